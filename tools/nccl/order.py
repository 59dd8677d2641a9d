"""What the ranks of all jobs have issued, by the model of NCCL's rules (`tests/rehearsal`)."""

from __future__ import annotations

from tools.nccl import steps
from tools.nccl.found import Found
from tools.nccl.session import Session

# Alone, the part has no job to look at, and runs so many steps.
_OWN_STEPS = 5


def run(session: Session) -> Found:
    """Judge the notes of the jobs before this part."""
    if not session.orders:
        steps.run_steps(session, _OWN_STEPS)
    found = Found()
    for one in session.orders:
        found.cases[one.job] = {
            "operations": one.num_operations,
            "communicators": one.made,
            "communicators_modelled": one.modelled,
            "status": "failed" if one.broken else "passed",
            **({"line": one.broken} if one.broken else {}),
        }
        if one.broken:
            found.failures.append(f"{one.job}: {one.broken}")
    operations = sum(one.num_operations for one in session.orders)
    logged = [one for one in session.orders if one.made]
    found.line = f"{operations:,} operations of {len(session.orders)} jobs"
    if logged:
        made, modelled = sum(one.made for one in logged), sum(one.modelled for one in logged)
        found.line += f"; NCCL made {made} communicators, {modelled} by the model"
    return found
