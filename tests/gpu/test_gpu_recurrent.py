"""flash-linear-attention's and mamba_ssm's kernels against torch's in fp64: rows of whole samples,
and of trees."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from megapack.model.recurrent.choice import (
    delta_rule_kernels,
    recurrent_kernels,
    state_space_kernels,
)
from megapack.model.recurrent.delta_rule import fla_delta_rule
from megapack.model.recurrent.segments import Segments
from megapack.model.recurrent.state_space import mamba_state_space
from megapack.prefixes import EARLIER
from tests.gpu.rehearsed import REHEARSED
from tests.recurrent_rows import Layer, Outs, largest_error, segments_of, with_gradients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        REHEARSED or not torch.cuda.is_available(), reason="Triton's kernels need a CUDA device"
    ),
]

# Those of Qwen3-Next on one of two tensor-parallel ranks, and of Nemotron-H on one of eight.
LAYERS = {
    "G": Layer("delta_rule", groups=8, heads=16, width=128, value=128, device="cuda"),
    "M": Layer("state_space", groups=1, heads=16, width=128, value=64, device="cuda"),
}


def row_of(name: str) -> Segments:
    if name == "whole samples":
        return segments_of([700, 1, 64, 513], [], device="cuda")
    parents = [EARLIER, 0, 0, -1, 2, -1]
    return segments_of([130, 3, 1, 500, 2, 64], parents, kept=2, device="cuda")


@pytest.mark.parametrize("row", ["whole samples", "tree"])
@pytest.mark.parametrize("letter", LAYERS)
def test_they_give_torchs_outputs_states_and_gradients(letter: str, row: str) -> None:
    kernels = delta_rule_kernels() if letter == "G" else state_space_kernels()
    if kernels.scan not in (fla_delta_rule, mamba_state_space):
        pytest.skip(recurrent_kernels(letter))
    layer, segments = LAYERS[letter], row_of(row)
    drawn = layer.tensors(sum(segments.lengths))
    carried = layer.carried() if EARLIER in segments.parents else []

    def run(dtype: torch.dtype, how: object) -> list[Tensor]:
        leaves = [x.detach().bfloat16().to(dtype).requires_grad_() for x in (*drawn, *carried)]
        state = leaves[len(drawn) :] or None
        outs: Outs = partial(layer.run, kernels=how)(leaves[: len(drawn)], segments, state)
        return [x.double() for x in with_gradients(outs, leaves)]

    wanted = run(torch.float64, None)
    fast = run(torch.bfloat16, (kernels.convolve, kernels.scan))
    slow = run(torch.bfloat16, None)
    assert 0 < largest_error(fast, wanted) < max(0.02, 2 * largest_error(slow, wanted))
