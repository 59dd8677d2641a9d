"""Many steps of random lengths: ranks never wait for each other for ever, and stay equal."""

from __future__ import annotations

from tools.nccl.found import Found
from tools.nccl.measured import read_results
from tools.nccl.session import Job, Session

MODULE = "tools.nccl.on_ranks.steps"
STEPS = 1000
_REHEARSED_STEPS = 12
# Seconds before the part's end in which the ranks end by themselves.
_END_S = 15.0


def run(session: Session) -> Found:
    """Run as many of the steps as the part's time allows; ranks on one GPU take turns on it."""
    wanted = _REHEARSED_STEPS if session.rehearsed else STEPS
    job = run_steps(session, wanted)
    out = session.out / "ranks" / "steps.json"
    done = read_results(out)
    found = Found(figures=done)
    found.line = (
        f"{done.get('steps', 0)} of {wanted:,} steps on {done.get('layout', '-')}, "
        f"{done.get('fewest', 0)} to {done.get('most', 0)} micro-batches per rank"
    )
    if not job.ended.is_good:
        found.failures.append(job.ended.reason)
    elif done["differences"]:
        found.failures.append(f"steps in which ranks differ: {done['differences'][:5]}")
    return found


def run_steps(session: Session, steps: int) -> Job:
    """The job of so many steps, which ends by itself before the part's time is over."""
    out = session.out / "ranks" / "steps.json"
    out.unlink(missing_ok=True)
    seconds = max(1.0, session.left_s - _END_S)
    return session.job("steps", MODULE, out, steps, f"{seconds:.0f}")
