"""One rank's fault ends the job on every rank, within seconds, with one error that names it.

These cases are a part of the matrix; `tools/fault_matrix.py` runs all of it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.dist.rank_faults import WORLD, Case, cases, run_case
from tests.dist.spawn import run_job

pytestmark = pytest.mark.dist

# Every fault, every phase and every rank occurs; no pair of fault and phase, or of fault and rank,
# occurs twice.
SAMPLE = [
    Case("bad_sample", "plan", 1),
    Case("bad_sample", "pack", 3),
    Case("out_of_memory", "backward", 2),
    Case("user_error", "forward", 1),
    Case("user_error", "reduction", 0),
    Case("nan", "forward", 0),
    Case("nan", "backward", 2),
    Case("nan", "reduction", 3),
    Case("nan", "output", 1),
    Case("killed", "forward", 2),
    Case("killed", "output", 0),
]


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_every_rank_raises_the_same_error(case: Case, tmp_path: Path) -> None:
    assert run_case(case, tmp_path).complaints == ()


@pytest.mark.parametrize(
    "case", [Case("user_error", "forward", 1), Case("nan", "reduction", 1)], ids=str
)
def test_also_if_ranks_communicate_inside_layers(case: Case, tmp_path: Path) -> None:
    layout = ("layout.dp=1", "layout.tp=2", "layout.pp=2")
    assert run_case(case, tmp_path, *layout).complaints == ()


def test_a_stopped_rank_is_named_and_the_job_ends(tmp_path: Path) -> None:
    """gloo's waits cannot be aborted: the watchdogs of waiting ranks end their processes."""
    args = [str(tmp_path), "stopped", "forward", "3"]
    # On a busy machine ranks take seconds to reach the exchange in which they wait.
    limits = ["watchdog.abort_after_s=10", "watchdog.slow_after_s=6"]
    # Each other rank ends in its watchdog's next round; the stopped one never ends.
    job = [*args, *limits]
    done = run_job(WORLD, "tests.dist.rank_fault_worker", job, timeout_s=100, grace_s=8)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    late = [line for line in lines if ": step 3, " in line and "has run for" in line]
    assert {rank for rank in range(3) for line in late if f"rank {rank}: " in line} == {0, 1, 2}
    # The first rank that ends may break the wait of another, whose main thread then raises.
    errors = [line for line in lines if line.startswith("megapack: rank ")]
    errors += [json.loads(path.read_text())["error"] for path in tmp_path.glob("rank*.json")]
    assert errors
    for error in errors:
        assert "which is above watchdog.abort_after_s=10; rank 3 (process " in error
        assert "is stopped (SIGSTOP, or a debugger)" in error
    exchanges = (", which sends ", ", which receives ")
    assert any(text in line for line in lines for text in exchanges), "no exchange is named"


def test_the_matrix_has_every_fault_phase_and_rank() -> None:
    assert len(set(cases())) == 4 * 6 * 5
    assert set(SAMPLE) <= set(cases())
