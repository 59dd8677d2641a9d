"""What communicators cost: seconds and bytes by number, beside what memory predictions assume."""

from __future__ import annotations

from megapack.cost.communicators import BYTES
from tools.nccl.found import Found
from tools.nccl.measured import read_results
from tools.nccl.session import Session
from tools.nccl.ways import OWN_GPUS

MODULE = "tools.nccl.on_ranks.communicators"
_MIB = 1 << 20


def run(session: Session) -> Found:
    """Make more and more communicators of all ranks."""
    out = session.out / "ranks" / "communicators.json"
    out.unlink(missing_ok=True)
    ended = session.job("job", MODULE, out, session.ranks // session.num_gpus or 1).ended
    figures = read_results(out)
    if not ended.is_good or not figures:
        return Found(failures=[ended.reason or "no figures"])
    parts = [
        f"{count}: {one['seconds']:.2f} s, {one['bytes'] / _MIB:.0f} MiB a rank"
        for count, one in figures.items()
    ]
    each = figures[max(figures, key=int)]["bytes"] / int(max(figures, key=int)) / _MIB
    line = "; ".join(parts) + f"; {each:.0f} MiB each, {BYTES / _MIB:.0f} assumed"
    if session.way is not OWN_GPUS:
        line += " (with small buffers and few channels, so that ranks fit on a GPU)"
    return Found(line=line, figures=figures)
