"""No forward of a micro-batch waits for the device, except where Megatron itself does."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from tests.dist.host_waits_worker import CASES, CountWaits
from tests.dist.spawn import checked_job, rank_reports

pytestmark = pytest.mark.dist

IS_0_19 = Version(version("megatron-core")) >= Version("0.19")
_MOE = "megatron.core/transformer/moe"

# Megatron's experts without Transformer Engine's kernels (fused permutation, grouped products).
# `sort_chunks_by_idxs` gets its sizes on the host, also on a GPU.
EXPERTS = {
    *(() if IS_0_19 else (f"{_MOE}/moe_utils.py:permute: masked_select",)),
    f"{_MOE}/moe_utils.py:sort_chunks_by_idxs: tolist",
    f"{_MOE}/experts.py:forward: tolist",
}
KNOWN = {name: EXPERTS if name == "experts" else set() for name in CASES}


def test_only_known_places_wait(tmp_path: Path) -> None:
    checked_job(1, "tests.dist.host_waits_worker", [str(tmp_path)], timeout_s=300)
    (found,) = rank_reports(tmp_path, 1)
    for name, known in KNOWN.items():
        assert found[name]["rows"] > 1
        for run in ("step", "forward"):
            assert set(found[name][run]) == known, f"{run} of {name}"


@pytest.mark.parametrize(
    "code",
    [
        *("x.sum().item()", "x.tolist()", "x.cpu()", "bool(x[0])", "int(x[0])", "float(x[0])"),
        *("x[x > 1]", "x[:, None][x > 1, 0]", "x.nonzero()", "x[: x[0].long()]"),
        *("x.__setitem__(x > 1, 0)", "torch.equal(x, x)", "x.masked_select(x > 1)"),
    ],
)
def test_what_waits_is_counted(code: str) -> None:
    mode = CountWaits()
    with mode:
        eval(code, {"torch": torch, "x": torch.arange(3.0)})
    assert mode.places, code


@pytest.mark.parametrize(
    "code", ["x[torch.tensor([0, 2])]", "x[1:] + 1", "torch.where(x > 1, x, 0)"]
)
def test_what_does_not_wait_is_not_counted(code: str) -> None:
    mode = CountWaits()
    with mode:
        eval(code, {"torch": torch, "x": torch.arange(3.0)})
    assert not mode.places, code
