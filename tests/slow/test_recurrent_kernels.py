"""The kernels that recurrent layers take on a GPU, in Triton's interpreter, against torch's."""

from __future__ import annotations

import pytest

from tests.child import child
from tests.recurrent_python import FOLDER, needs_recurrent

pytestmark = [pytest.mark.slow, needs_recurrent]

CODE = """
import functools
import json
import torch
from tests import recurrent_python
recurrent_python.interpret()
recurrent_python.with_reference_of_causal_conv1d()
from megapack.model.recurrent.convolution import dao_convolution, fla_convolution
from megapack.model.recurrent.delta_rule import fla_delta_rule
from megapack.model.recurrent.state_space import mamba_state_space
from megapack.prefixes import EARLIER
from tests.recurrent_rows import Layer, error, segments_of

kernels = {
    "delta_rule": (fla_convolution, fla_delta_rule),
    "state_space": (dao_convolution, mamba_state_space),
}
layer = Layer("KIND", groups=2, heads=4, width=16, value=32, dtype=torch.float32)
rows = {
    "whole samples": segments_of([7, 1, LONG], []),
    "tree": segments_of([LONG, 3, 1, 5, 2, 4], [EARLIER, 0, 0, -1, 2, -1], kept=2),
}
run = functools.partial(layer.run, kernels=kernels["KIND"])
print(json.dumps({name: error(layer, row, run, layer.run) for name, row in rows.items()}))
"""


@pytest.mark.parametrize(
    ("kind", "long"),
    # More tokens than a chunk has.
    [("delta_rule", 70), ("state_space", 130)],
)
def test_they_give_torchs_outputs_states_and_gradients_in_fp32(kind: str, long: int) -> None:
    code = CODE.replace("KIND", kind).replace("LONG", str(long))
    found = child(code, path=FOLDER, timeout_s=900)
    assert found.keys() == {"whole samples", "tree"}
    assert max(found.values()) < 1e-5
    assert min(found.values()) > 0
