"""Backwards whose weight gradients come later have the bits of joint ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.spawn import checked_job, rank_reports
from tests.dist.split_backward_worker import CASES, TE_CASES, Case
from tests.te_python import needs_te

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("world", [1, 2, 4])
def test_split_backwards_have_the_bits_of_joint_ones(world: int, tmp_path: Path) -> None:
    _check(CASES, world, tmp_path)


@needs_te
@pytest.mark.parametrize("world", [1, 2])
def test_split_backwards_of_transformer_engines_layers(world: int, tmp_path: Path) -> None:
    _check(TE_CASES, world, tmp_path, te="2.11.0")


def _check(cases: dict[str, Case], world: int, folder: Path, te: str | None = None) -> None:
    names = [name for name, case in cases.items() if case.layout.world_size == world]
    args = [str(folder), *names]
    checked_job(world, "tests.dist.split_backward_worker", args, timeout_s=180, te=te)
    for rank, report in enumerate(rank_reports(folder, world)):
        for name in names:
            facts = report[name]
            assert facts["unsteady"] == [], f"{name}: joint steps of rank {rank} differ"
            assert facts["different"] == [], f"{name}, rank {rank}"
            assert facts["zero"] == [], f"{name}, rank {rank}"
