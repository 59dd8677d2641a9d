"""One rank's fault ends the job on every rank, within seconds, with one error that names it.

These cases are a part of the matrix; `tools/fault_matrix.py` runs all of it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.ranks.rank_fault_worker import OTHER_SHARERS, STOPPED
from tests.dist.ranks.rank_faults import SHARED, Case, cases, run_case

pytestmark = pytest.mark.dist

# Every fault, every phase and every rank occurs; no pair of fault and phase, or of fault and rank,
# occurs twice.
WEEKLY = [
    # test_out_of_memory.py has it in a forward and in a layer.
    Case("out_of_memory", "backward", 2),
    Case("bad_sample", "pack", 3),
    Case("user_error", "reduction", 0),
    Case("nan", "forward", 0),
    Case("nan", "backward", 2),
    Case("killed", "forward", 2),
    Case("bad_sample", "plan", 1),
    Case("nan", "reduction", 3),
]
SAMPLE = [
    Case("killed", "output", 0),
    *WEEKLY,
]


def own_mark(case: Case) -> object:
    return pytest.param(case, marks=pytest.mark.weekly) if case in WEEKLY else case


@pytest.mark.parametrize("case", [own_mark(case) for case in SAMPLE], ids=str)
def test_every_rank_raises_the_same_error(case: Case, tmp_path: Path) -> None:
    assert run_case(case, tmp_path).complaints == ()


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case("user_error", "forward", 1), marks=pytest.mark.weekly),
        Case("nan", "reduction", 1),
    ],
    ids=str,
)
def test_also_if_ranks_communicate_inside_layers(case: Case, tmp_path: Path) -> None:
    layout = ("layout.dp=1", "layout.tp=2", "layout.pp=2")
    assert run_case(case, tmp_path, *layout).complaints == ()


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case("user_error", "forward", 2), marks=pytest.mark.weekly),
        Case(OTHER_SHARERS, "plan", 1),
    ],
    ids=str,
)
def test_also_in_a_micro_batch_that_dp_ranks_share(case: Case, tmp_path: Path) -> None:
    assert run_case(case, tmp_path, SHARED).complaints == ()


def test_a_stopped_rank_is_named_and_the_job_ends(tmp_path: Path) -> None:
    assert run_case(Case(STOPPED, "forward", 3), tmp_path).complaints == ()


def test_the_matrix_has_every_fault_phase_and_rank() -> None:
    assert len(set(cases())) == 4 * 6 * 5
    assert set(SAMPLE) <= set(cases())
