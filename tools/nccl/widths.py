"""A cost model with rows over 2, 4 and 8 ranks, by `tools/calibrate.py`, and its errors."""

from __future__ import annotations

import time
from pathlib import Path

from tools.nccl.found import PASSED, Found
from tools.nccl.measured import read_config, read_results, settings, write_task
from tools.nccl.session import Session

MODULE = "tools.nccl.on_ranks.widths"
_ROUNDS = 5
# Seconds before the part's end in which the last round may still run.
_END_S = 20.0


def cost_file(session: Session) -> Path:
    """Where the cost model is kept, for `race` and for plans of this machine."""
    return session.out / "ranks_cost.yaml"


def run(session: Session) -> Found:
    """Time rows of one rank and of several, and fit."""
    out = session.out / "ranks" / "widths_found.json"
    for path in (out, cost_file(session)):
        path.unlink(missing_ok=True)
    end = time.monotonic() + max(1.0, session.left_s - _END_S)
    rounds = 1 if session.rehearsed else _ROUNDS
    overrides = settings(session)
    # Rows as long as the longest sample, which the race has.
    overrides.append(f"plan.max_tokens_per_gpu={read_config(overrides).data.max_length}")
    task = write_task(session, "job", end, settings=overrides, rounds=rounds)
    ended = session.job("job", MODULE, task, out, cost_file(session)).ended
    done = read_results(out)
    if not ended.is_good or not done:
        return Found(failures=[ended.reason or "no figures"])
    cases = {name: {**errors, "status": PASSED} for name, errors in done.pop("errors").items()}
    worst = max(case["mean_error"] for case in cases.values())
    line = (
        f"cp_overhead {done['cp_overhead']:.3f} and cp_fixed {done['cp_fixed_us']:.0f} us, from "
        f"sizes {done['cp_overhead_from_sizes']:.3f} and {done['cp_fixed_us_from_sizes']:.0f}; "
        f"mean errors of rows at most {worst:.1%}, from sizes "
        f"{max(case['mean_error_from_sizes'] for case in cases.values()):.1%}; "
        f"{cost_file(session).name} has the model"
    )
    return Found(line=line, cases=cases, figures=done)
