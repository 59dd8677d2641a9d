"""Steps with and without gradients and weights that travel while layers run, in turn."""

from __future__ import annotations

import time
from typing import Any

from megapack import Layout
from tools.nccl.exact import progress_of
from tools.nccl.found import FAILED, NOT_RUN, PASSED, Found
from tools.nccl.layouts import layout_name
from tools.nccl.measured import read_config, read_results, samples, settings, write_task
from tools.nccl.session import Session

MODULE = "tools.nccl.on_ranks.overlap"
_ROUNDS = 15
_TOKENS_PER_RANK, _TINY_TOKENS_PER_RANK = 16384, 512
_END_S = 10.0
# Relative. The same gradients are added, in other buckets.
_LIMIT = 1e-3


def layouts(ranks: int) -> list[Layout]:
    """Data parallelism alone, and with two stages where it has ranks left."""
    return [Layout(dp=ranks), *([Layout(dp=ranks // 2, pp=2)] if ranks >= 4 else [])]


def run(session: Session) -> Found:
    """Measure each layout, all in one job."""
    out = session.out / "ranks" / "overlap_found.json"
    out.unlink(missing_ok=True)
    overrides = settings(session)
    per_rank = _TINY_TOKENS_PER_RANK if session.rehearsed else _TOKENS_PER_RANK
    task = write_task(
        session,
        "job",
        time.monotonic() + max(1.0, session.left_s - _END_S),
        settings=overrides,
        layouts=[layout.to_payload() for layout in layouts(session.ranks)],
        samples=samples(read_config(overrides), session.ranks * per_rank),
        rounds=2 if session.rehearsed else _ROUNDS,
    )
    ended = session.job("job", MODULE, task, out).ended
    done = read_results(out)
    found = Found()
    for name in map(layout_name, layouts(session.ranks)):
        found.cases[name] = judged(done.get(name, {}))
        if found.cases[name]["status"] == FAILED:
            found.failures.append(f"{name}: {found.cases[name]['line']}")
    if not ended.is_good:
        at = progress_of(ended.logs) or "start"
        found.failures.append(f"{at}: {ended.reason}")
    parts = [
        f"{name}: on takes {case['on_of_off']:.2f} of off"
        for name, case in found.cases.items()
        if case["status"] != NOT_RUN
    ]
    found.line = "; ".join(parts)
    return found


def judged(figures: dict[str, Any]) -> dict[str, Any]:
    """The figures of a layout, and whether both ways have one gradient."""
    if not figures:
        return {"status": NOT_RUN}
    if figures["norm_difference"] <= _LIMIT:
        return {**figures, "status": PASSED}
    line = f"gradient norms differ by {figures['norm_difference']:.1e}, at most {_LIMIT:.0e}"
    return {**figures, "status": FAILED, "line": line}
