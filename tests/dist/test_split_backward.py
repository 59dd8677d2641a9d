"""Backwards whose weight gradients come later have the bits of joint ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.spawn import checked_job, rank_reports
from tests.dist.split_backward_worker import CASES

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("world", [1, 2, 4])
def test_split_backwards_have_the_bits_of_joint_ones(world: int, tmp_path: Path) -> None:
    names = [name for name, case in CASES.items() if case.layout.world_size == world]
    checked_job(world, "tests.dist.split_backward_worker", [str(tmp_path), *names], timeout_s=180)
    for rank, report in enumerate(rank_reports(tmp_path, world)):
        for name in names:
            facts = report[name]
            assert facts["unsteady"] == [], f"{name}: joint steps of rank {rank} differ"
            assert facts["different"] == [], f"{name}, rank {rank}"
            assert facts["zero"] == [], f"{name}, rank {rank}"
