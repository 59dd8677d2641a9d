"""Megatron's DDP, clipping and distributed optimizer reach one process's weights on any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.optimizer_worker import CLIP
from tests.dist.spawn import checked_job

pytestmark = pytest.mark.dist


def train(folder: Path, dp: int, pp: int, vpp: int, distributed: bool) -> dict[str, Any]:
    """Norms, and the parameters of all ranks by their names in the whole model."""
    folder.mkdir()
    args = [str(folder), str(dp), str(pp), str(vpp), str(distributed)]
    checked_job(dp * pp, "tests.dist.optimizer_worker", args, timeout_s=180)
    ranks = [torch.load(path) for path in sorted(folder.glob("rank*.pt"))]
    assert len(ranks) == dp * pp
    merged: dict[str, torch.Tensor] = {}
    for rank in ranks:
        assert rank["norms"] == ranks[0]["norms"]
        for name, value in rank["parameters"].items():
            assert torch.equal(merged.setdefault(name, value), value), name
    return {"norms": ranks[0]["norms"], "parameters": merged}


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train(tmp_path_factory.mktemp("single") / "out", 1, 1, 1, False)


@pytest.mark.parametrize(
    ("dp", "pp", "vpp", "distributed"), [(2, 1, 1, True), (2, 2, 2, True), (2, 2, 1, False)]
)
def test_three_clipped_steps_reach_the_same_weights(
    dp: int, pp: int, vpp: int, distributed: bool, single: dict[str, Any], tmp_path: Path
) -> None:
    found = train(tmp_path / "out", dp, pp, vpp, distributed)
    assert min(single["norms"]) > CLIP, "nothing would be clipped"
    assert found["norms"] == pytest.approx(single["norms"], rel=1e-5)
    assert found["parameters"].keys() == single["parameters"].keys()
    for name, value in single["parameters"].items():
        # Adam divides by the gradient's size, so rounding of tiny gradients shows at 1e-5 * lr.
        assert torch.allclose(found["parameters"][name], value, rtol=1e-4, atol=1e-5), name
