"""Runs one case of the fault matrix and checks how the job ended."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.dist.ranks.rank_fault_worker import (
    FAULTS,
    IN_ONE_PHASE,
    ON_RANK_0,
    OTHER_SHARERS,
    PHASES,
    STOPPED,
)
from tests.dist.spawn import run_job

LIMIT_S = 20.0
"""Limit for the seconds from the fault until the last rank has its error."""
WORLD = 4
MESSAGES = {
    "bad_sample": "DataError: sample 3 has no tokens",
    "out_of_memory": "CUDA out of memory",
    "user_error": "ValueError: the user's own code failed",
    "nan": ("NaN", "nan"),
    "killed": "is gone: it was killed",
    OTHER_SHARERS: "in plan (rank ",
}
"""Texts of each fault; every rank's error contains one of them."""
SHARED = "plan.context_parallel=dynamic"
"""The setting with which DP ranks share the micro-batches of faults."""


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
    """Each fault in each of its phases, on each rank that has the phase."""
    return [
        Case(fault, phase, rank)
        for fault in faults
        for phase in phases
        for rank in ranks
        if IN_ONE_PHASE.get(fault, phase) == phase and (rank == 0 or phase not in ON_RANK_0)
    ]


def run_case(case: Case, folder: Path, *overrides: str) -> Outcome:
    """Run a case in an empty folder."""
    if case.fault == STOPPED:
        return _run_stopped(case.rank, folder, *overrides)
    args = [str(folder), case.fault, case.phase, str(case.rank), *overrides]
    done = run_job(
        WORLD, "tests.dist.ranks.rank_fault_worker", args, timeout_s=150, grace_s=LIMIT_S
    )
    if not (folder / "injected").exists():
        return Outcome(0.0, (f"the fault did not happen: {done.stdout[-2000:]}",))
    injected = float((folder / "injected").read_text(encoding="utf-8"))
    reports = {
        rank: json.loads(path.read_text(encoding="utf-8"))
        for rank in range(WORLD)
        if (path := folder / f"rank{rank}.json").exists()
    }
    seconds = max((float(report["time"]) for report in reports.values()), default=0.0) - injected
    complaints = list(_complaints(case, reports, _named(case, overrides)))
    if done.returncode == 0:
        complaints.append("the job ended with 0")
    if seconds > LIMIT_S:
        complaints.append(f"{seconds:.1f} s")
    return Outcome(seconds, tuple(complaints))


def _run_stopped(rank: int, folder: Path, *overrides: str) -> Outcome:
    """Stop a rank in a forward; the watchdogs of the others have to name it and end the job.

    gloo's waits cannot be aborted: the watchdogs of waiting ranks end their processes.
    """
    # On a busy machine ranks take seconds to reach the exchange in which they wait.
    limits = ["watchdog.abort_after_s=10", "watchdog.slow_after_s=6"]
    args = [str(folder), STOPPED, "forward", str(rank), *limits, *overrides]
    # Each other rank ends in its watchdog's next round; the stopped one never ends.
    done = run_job(WORLD, "tests.dist.ranks.rank_fault_worker", args, timeout_s=100, grace_s=8)
    lines = done.stdout.splitlines()
    complaints = [] if done.returncode == 1 else [f"the job ended with {done.returncode}"]
    late = [line for line in lines if ": step 3, " in line and "has run for" in line]
    others = set(range(WORLD)) - {rank}
    if {r for r in others for line in late if f"rank {r}: " in line} != others:
        complaints.append(f"not all of the other ranks say that they are late: {late}")
    # The first rank that ends may break the wait of another, whose main thread then raises.
    errors = [line for line in lines if line.startswith("megapack: rank ")]
    errors += [json.loads(path.read_text())["error"] for path in folder.glob("rank*.json")]
    stopped = f"which is above watchdog.abort_after_s=10; rank {rank} (process "
    if not errors:
        complaints.append("no rank has an error")
    for error in errors:
        if stopped not in error or "is stopped (SIGSTOP, or a debugger)" not in error:
            complaints.append(f"{error!r} does not name rank {rank}, which is stopped")
    exchanges = (", which sends ", ", which receives ")
    if not any(text in line for line in lines for text in exchanges):
        complaints.append("no exchange is named")
    injected = float((folder / "injected").read_text(encoding="utf-8"))
    return Outcome(time.time() - injected, tuple(complaints))


def _named(case: Case, overrides: Sequence[str]) -> set[int]:
    """The ranks that the error may name: that of the fault, and those that its NaN reaches inside
    of the layers of one chunk."""
    spreads = SHARED in overrides and (case.fault, case.phase) == ("nan", "backward")
    # Ranks 0 and 1 are the DP ranks of the first stage, 2 and 3 those of the second.
    return {case.rank, case.rank ^ 1} if spreads else {case.rank}


def _complaints(case: Case, reports: dict[int, dict[str, str]], named: set[int]) -> list[str]:
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
        found = {int(number) for number in re.findall(r"\brank (\d)", report["error"])}
        if case.fault == "nan" and not found <= named:
            complaints.append(
                f"rank {rank}: {report['error']!r} names ranks that only received the NaN"
            )
        if case.fault == "user_error" and "rank_fault_worker.py" not in (
            report["notes"] + report["cause"]
        ):
            complaints.append(f"rank {rank}: no traceback of the origin")
    return complaints
