"""A rank that is killed and one that runs out of memory: how the others end, and what is left.

Both happen in the main job, in the second micro-batch of the third step, on the last rank.
"""

from __future__ import annotations

import json
from typing import Any

from tools.nccl import probe
from tools.nccl.found import Found
from tools.nccl.layouts import busy_layout
from tools.nccl.session import PATIENCE, Session

MODULE = "tests.dist.ranks.rank_fault_worker"
# From the fault to the last rank's error. The watchdog looks every second.
LIMIT_S = 20.0


def killed(session: Session) -> Found:
    """Kill a rank."""
    return _run(session, "killed", "is gone: it was killed")


def out_of_memory(session: Session) -> Found:
    """Let a rank ask for more memory than its GPU has."""
    return _run(session, "out_of_memory", "CUDA out of memory")


def _run(session: Session, fault: str, says: str) -> Found:
    folder = session.folder("job_files")
    rank = session.ranks - 1
    layout = busy_layout(session.ranks)
    settings = ["device=cuda", f"layout.dp={layout.dp}", f"layout.pp={layout.pp}"]
    settings += [f"layout.vpp={layout.vpp}", "model.attention=sdpa"]
    job = session.job(
        "job", MODULE, folder, fault, "forward", rank, *settings, grace_s=LIMIT_S
    ).ended
    found = Found()
    if not (folder / "injected").exists():
        found.failures.append(f"the fault did not happen: {job.reason or 'the job ended well'}")
        return found
    injected = float((folder / "injected").read_text(encoding="utf-8"))
    expected = set(range(session.ranks)) - ({rank} if fault == "killed" else set())
    reports: dict[int, dict[str, Any]] = {
        one: json.loads(path.read_text(encoding="utf-8"))
        for one in expected
        if (path := folder / f"rank{one}.json").exists()
    }
    seconds = max((float(one["time"]) for one in reports.values()), default=injected) - injected
    limit_s = LIMIT_S * (PATIENCE if session.rehearsed else 1)
    if missing := expected - set(reports):
        found.failures.append(f"ranks {sorted(missing)} ended without an error: {job.reason}")
    for one, report in reports.items():
        if says not in report["error"] or f"rank {rank}" not in report["error"]:
            text = report["error"][:300]
            found.failures.append(f"rank {one} does not name rank {rank} and its fault: {text!r}")
    if job.killed:
        found.failures.append(f"ranks {list(job.killed)} did not end by themselves: {job.reason}")
    died = [one for one in expected if (job.codes[one] or 0) < 0 and one not in job.killed]
    if died:
        codes = ", ".join(f"rank {one}: {job.codes[one]}" for one in died)
        found.failures.append(f"ranks that had their error ended by a signal ({codes})")
    if seconds > limit_s:
        found.failures.append(f"the last error came after {seconds:.1f} s, limit {limit_s:.0f} s")
    # What a rank left on the GPU must not keep the next job from starting.
    after = session.job("next_job", probe.MODULE, session.out / "ranks" / "after.json").ended
    if not after.is_good:
        found.failures.append(f"the next job: {after.reason}")
    found.figures = {"seconds": round(seconds, 1), "codes": job.codes}
    found.line = f"{len(reports)} ranks named rank {rank} within {seconds:.1f} s"
    return found
