"""Hosts' own recurrent layers on a row whose samples share prefixes: equal to one sample at a time.

Each layer is its host's class, with torch in place of flash-linear-attention.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.spawn import run_code
from tests.hosts.steps.mamba import needs_mamba
from tools.hosting.sources import NoSource, source

pytestmark = pytest.mark.hosts

CHILD = """
import json
from tests.hosts import recurrent_layers

print(json.dumps(recurrent_layers.compare(HOST)))
"""


@needs_mamba
@pytest.mark.parametrize("host", ["slime", "miles", "mcore_bridge", "skyrl"])
def test_a_shared_row_is_its_samples(host: str) -> None:
    try:
        source(host)
    except NoSource as error:
        pytest.skip(str(error))
    for name, numbers in run_code(CHILD.replace("HOST", repr(host))).items():
        check(name, numbers)


def check(name: str, numbers: dict[str, Any]) -> None:
    assert numbers["tokens"] == [38, 24], name
    assert numbers["outputs"] < 1e-5, name
    assert numbers["gradients"] < 1e-5, name
    # Without the states it is another layer.
    assert numbers["undriven"] > 1e-2, name
    # The next row is the host's again.
    assert numbers["after"] == 0, name
    assert numbers["pieces"] == f"{name} with samples in pieces", name
