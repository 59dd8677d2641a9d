"""Backwards whose weight gradients come later have the bits of joint ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.schedule.split_backward_worker import CASES, TE_CASES
from tests.dist.spawn import checked_job, rank_reports
from tests.marks import needs_te
from tests.te_python import VERSION

pytestmark = pytest.mark.dist

# Others have the same parts.
WEEKLY_CASES = {"4-", f"2-{VERSION}"}


WORLDS = [
    *((1, ""), pytest.param(2, "", marks=pytest.mark.weekly), (4, "")),
    *(pytest.param(world, VERSION, marks=needs_te) for world in (1, 2)),
]


@pytest.mark.parametrize(("world", "te"), WORLDS)
def test_split_backwards_have_the_bits_of_joint_ones(world: int, te: str, tmp_path: Path) -> None:
    names = [name for name, case in CASES.items() if case.layout.world_size == world]
    if te:
        names = [name for name in names if name in TE_CASES]
    args = [str(tmp_path), *names]
    checked_job(world, "tests.dist.schedule.split_backward_worker", args, timeout_s=180, te=te)
    for rank, report in enumerate(rank_reports(tmp_path, world)):
        for name in names:
            facts = report[name]
            assert facts["unsteady"] == [], f"{name}: joint steps of rank {rank} differ"
            assert facts["different"] == [], f"{name}, rank {rank}"
            assert facts["zero"] == [], f"{name}, rank {rank}"
