"""Which way ranks can use NCCL together on this machine, or why none works."""

from __future__ import annotations

import json
import re

from tools.nccl.found import Found
from tools.nccl.launch import Ended
from tools.nccl.session import Session
from tools.nccl.ways import ways

MODULE = "tools.nccl.on_ranks.probe"
_WARNING = re.compile(r"NCCL WARN (.*)")


def run(session: Session) -> Found:
    """Try the ways in their order; `session.way` becomes the first that works."""
    tried = ways(session.ranks, session.num_gpus)
    found = Found()
    refusals = []
    for number, way in enumerate(tried):
        out = session.out / "probe.json"
        out.unlink(missing_ok=True)
        # The first way may hang: half of the time is the next one's.
        limit_s = session.left_s / (len(tried) - number)
        name = way.name.replace(" ", "_")
        ended = session.job(name, MODULE, out, way=way, limit_s=limit_s).ended
        if ended.is_good and out.exists():
            session.way = way
            found.figures = json.loads(out.read_text(encoding="utf-8")) | {"way": way.name}
            second = {name: times[1] for name, times in found.figures["seconds"].items()}
            times = ", ".join(f"{name} {1e3 * value:.1f} ms" for name, value in second.items())
            version = found.figures["nccl"] or "absent"
            found.line = f"NCCL {version}; {way.says}; {times}"
            break
        refusals.append(f"{way.name}: {_reason(ended)}")
        found.cases[way.name] = {"status": "refused", "line": refusals[-1]}
    else:
        found.failures = refusals
    return found


def _reason(ended: Ended) -> str:
    """What NCCL itself says, of any rank; else why the job ended."""
    for log in ended.logs:
        own = log.with_suffix(".nccl")
        text = own.read_text(encoding="utf-8", errors="replace") if own.exists() else ""
        if warning := _WARNING.search(text):
            return warning[1].strip()[:300]
    return ended.reason
