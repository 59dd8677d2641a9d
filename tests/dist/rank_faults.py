"""Runs one case of the fault matrix and checks how the job ended."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.dist.rank_fault_worker import FAULTS, ON_RANK_0, PHASES
from tests.dist.spawn import run_job

LIMIT_S = 20.0
"""Limit for the seconds from the fault until the last rank has its error."""
WORLD = 4
MESSAGES = {
    "bad_sample": "DataError: sample 3 has no tokens",
    "out_of_memory": "OutOfMemoryError: CUDA out of memory",
    "user_error": "ValueError: the user's own code failed",
    "nan": ("NaN", "nan"),
    "killed": "is gone: it was killed",
}
"""Texts of each fault; every rank's error contains one of them."""


@dataclass(frozen=True)
class Case:
    """A fault in a phase on a rank."""

    fault: str
    phase: str
    rank: int

    def __str__(self) -> str:
        return f"{self.fault}-{self.phase}-rank{self.rank}"


@dataclass(frozen=True)
class Outcome:
    """How a case ended."""

    seconds: float
    """Seconds from the fault to the last rank's error."""
    complaints: tuple[str, ...]
    """What went wrong; empty if the job ended as promised."""


def cases(
    faults: Sequence[str] = FAULTS,
    phases: Sequence[str] = PHASES,
    ranks: Sequence[int] = range(WORLD),
) -> list[Case]:
    """Each fault in each phase, on each rank that has the phase."""
    return [
        Case(fault, phase, rank)
        for fault in faults
        for phase in phases
        for rank in ranks
        if rank == 0 or phase not in ON_RANK_0
    ]


def run_case(case: Case, folder: Path, *overrides: str) -> Outcome:
    """Run a case in an empty folder."""
    args = [str(folder), case.fault, case.phase, str(case.rank), *overrides]
    done = run_job(WORLD, "tests.dist.rank_fault_worker", args, timeout_s=150, grace_s=LIMIT_S)
    if not (folder / "injected").exists():
        return Outcome(0.0, (f"the fault did not happen: {done.stdout[-2000:]}",))
    injected = float((folder / "injected").read_text(encoding="utf-8"))
    reports = {
        rank: json.loads(path.read_text(encoding="utf-8"))
        for rank in range(WORLD)
        if (path := folder / f"rank{rank}.json").exists()
    }
    seconds = max((float(report["time"]) for report in reports.values()), default=0.0) - injected
    complaints = list(_complaints(case, reports))
    if done.returncode == 0:
        complaints.append("the job ended with 0")
    if seconds > LIMIT_S:
        complaints.append(f"{seconds:.1f} s")
    return Outcome(seconds, tuple(complaints))


def _complaints(case: Case, reports: dict[int, dict[str, str]]) -> list[str]:
    expected = set(range(WORLD))
    if case.fault == "killed":
        expected -= {case.rank}
    complaints = []
    if set(reports) != expected:
        complaints.append(f"only ranks {sorted(reports)} have errors")
    texts = {report["error"] for report in reports.values()}
    if len(texts) > 1:
        complaints.append(f"ranks have different errors: {sorted(texts)}")
    texts_of_fault = MESSAGES[case.fault]
    if isinstance(texts_of_fault, str):
        texts_of_fault = (texts_of_fault,)
    for rank, report in reports.items():
        if not any(text in report["error"] for text in texts_of_fault):
            complaints.append(f"rank {rank}: {report['error']!r} does not name the fault")
        if f"rank {case.rank}" not in report["error"]:
            complaints.append(f"rank {rank}: {report['error']!r} does not name rank {case.rank}")
        if case.fault == "nan" and len(re.findall(r"\brank \d", report["error"])) > 1:
            complaints.append(
                f"rank {rank}: {report['error']!r} names ranks that only received the NaN"
            )
        if case.fault == "user_error" and "rank_fault_worker.py" not in (
            report["notes"] + report["cause"]
        ):
            complaints.append(f"rank {rank}: no traceback of the origin")
    return complaints
