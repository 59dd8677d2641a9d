"""DDP's overlapping communication gives exact gradients in steps of different M."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.schedule.overlap_worker import CASES
from tests.dist.spawn import checked_job

pytestmark = pytest.mark.dist

# The largest relative error of all gradients or weights of a rank.
MAX_ERROR = 1e-5
# Other cases have all of their settings.
WEEKLY_CASES = (
    *("dp2", "dp2_pp2", "sharded_dp2", "sharded_dp2_pp2", "dp2_pp2_untied"),
    "sharded_dp2_pp2_mtp",
)


def train(folder: Path, name: str) -> list[Any]:
    """The results of each rank."""
    folder.mkdir()
    world = CASES[name].layout.world_size
    checked_job(world, "tests.dist.schedule.overlap_worker", [str(folder), name], timeout_s=180)
    return [torch.load(path) for path in sorted(folder.glob("rank*.pt"))]


@pytest.fixture(scope="module")
def single_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """A variant's results in one process that runs one unpadded sample at a time."""
    folder = tmp_path_factory.mktemp("single")

    def run(variant: str) -> Any:
        name = "single" if variant == "plain" else f"{variant}_single"
        return train(folder / name, name)[0]

    return functools.cache(run)


@pytest.mark.parametrize("name", [name for name in CASES if "single" not in name])
def test_steps_of_different_m(name: str, single_of: Callable[[str], Any], tmp_path: Path) -> None:
    case = CASES[name]
    single = single_of(case.variant)
    for rank in train(tmp_path / "out", name):
        counts = [max(step["counts"]) for step in rank["steps"]]
        assert counts[2] < counts[0] < counts[1], "M does not change as it should"
        for step, want in zip(rank["steps"], single["steps"], strict=True):
            assert step["loss"] == pytest.approx(want["loss"], rel=1e-5)
            if not case.distributed:
                assert error(step["gradients"], want["gradients"]) < MAX_ERROR
            assert error(step["weights"], want["weights"]) < MAX_ERROR
        moved = error(single["weights"], single["steps"][0]["weights"])
        assert moved > 1e-2, "the optimizer hardly moved the weights"
        assert error(rank["weights"], single["weights"]) < MAX_ERROR


def error(values: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Norm of the differences relative to that of the wanted values, over all tensors."""
    difference = torch.stack([(value - wanted[n]).norm() for n, value in values.items()]).norm()
    norm = torch.stack([wanted[n].norm() for n in values]).norm()
    return float(difference / norm)
