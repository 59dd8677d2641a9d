"""Exactness over NCCL: every layout against one process that runs one unpadded sample at a time.

A case that fails, hangs or dies ends its job; the next job begins with the case after it.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from tools.nccl.found import FAILED, NOT_RUN, PASSED, Found
from tools.nccl.measured import read_results
from tools.nccl.problem import FEATURES, cases
from tools.nccl.session import Session

MODULE = "tools.nccl.on_ranks.exact"
REFERENCE = "tools.nccl.on_ranks.reference"
# Of fp32: those of the CPU tests. In bf16 the limit is twice the error of one sample at a time.
_GRADIENT, _LOGPROB, _LOSS = 1e-5, 3e-5, 1e-5
# A job with less time than this would end in the middle of its first case.
_LEAST_S = 15.0
# After so many jobs in a row whose first case has failed, the others would fail too.
_MAX_FRUITLESS = 2


def run(session: Session) -> Found:
    """Run the cases, the most telling first, until the time is over."""
    reference = session.out / "ranks" / "reference.pt"
    alone = session.job("reference", REFERENCE, reference, world=1).ended
    if not alone.is_good:
        return Found(failures=[f"the reference: {alone.reason}"])
    found = Found()
    known = {case.name: case for case in cases(session.ranks)}
    names = list(known)
    waiting = list(names)
    number = fruitless = 0
    while waiting and session.left_s > _LEAST_S and fruitless < _MAX_FRUITLESS:
        number += 1
        out = session.out / "ranks" / f"exact{number}.json"
        out.unlink(missing_ok=True)
        ended = session.job(f"job{number}", MODULE, reference, out, *waiting).ended
        done = read_results(out)
        for name, figures in done.items():
            found.cases[name] = judged(figures, FEATURES[known[name].feature].must_hold)
            waiting.remove(name)
        if ended.is_good:
            break
        fruitless = 0 if done else fruitless + 1
        at = progress_of(ended.logs)
        name = at if at in waiting else waiting[0]
        waiting.remove(name)
        if session.left_s > _LEAST_S or not ended.limit.startswith("ran past"):
            found.cases[name] = {"status": FAILED, "line": ended.reason}
            if at not in names:
                # No case has begun, so the others would not begin either.
                break
    for name in names:
        found.cases.setdefault(name, {"status": NOT_RUN})
        if found.cases[name]["status"] == FAILED:
            found.failures.append(f"{name}: {found.cases[name]['line']}")
    found.line = _line(found.cases)
    if not any(case["status"] == PASSED for case in found.cases.values()):
        found.failures.append("no case has passed")
    return found


def progress_of(logs: tuple[Path, ...]) -> str:
    """What the rank that is furthest behind has noted last; "" if one has noted nothing."""
    notes = [log.with_suffix(".progress") for log in logs]
    texts = [(path.stat().st_mtime, path.read_text()) for path in notes if path.exists()]
    return min(texts)[1] if len(texts) == len(notes) else ""


def judged(figures: dict[str, Any], must_hold: str = "") -> dict[str, Any]:
    """The figures of a case, whether they are right, and what is wrong in them.

    Args:
        must_hold: a figure that must be above 0, or 100 times the limit of log-probs.
    """
    wrong = [f"{name} {value:.2e}, at most {most:.2e}" for name, value, most in _limits(figures)]
    if must_hold and figures[must_hold] < 100 * _LOGPROB:
        wrong.append(f"{must_hold} {figures[must_hold]}: the case is not about that")
    status = {"status": FAILED, "line": "; ".join(wrong)} if wrong else {"status": PASSED}
    return {**figures, **status}


def _limits(figures: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Name, value and limit of what is above its limit; a NaN is above any."""
    is_rounded = "one_sample_logprob_mean_error" in figures
    checked = [("logprob_mean_error", _LOGPROB)]
    if "gradient_error" in figures:
        checked.append(("gradient_error", _GRADIENT))
    if "updated_logprob_error" in figures:
        checked.append(("updated_logprob_error", 10 * _LOGPROB))
    rows = []
    for name, most in checked:
        limit = 2 * figures[f"one_sample_{name}"] if is_rounded else most
        rows.append((name, figures[name], limit))
    loss = figures["expected_loss"]
    distance = abs(figures["loss"] - loss) / max(abs(loss), 0.1)
    rows.append(("error of the loss", distance, 1e-2 if is_rounded else _LOSS))
    return [row for row in rows if not row[1] <= row[2] or math.isnan(row[2])]


def _line(found: dict[str, dict[str, Any]]) -> str:
    counts = {
        status: sum(case["status"] == status for case in found.values())
        for status in (PASSED, FAILED, NOT_RUN)
    }
    parts = [f"{count} {status}" for status, count in counts.items() if count]
    precise = [
        case["gradient_error"]
        for name, case in found.items()
        if "fp32" in name.split() and "gradient_error" in case
    ]
    if precise:
        parts.append(f"largest gradient error in fp32 {max(precise):.1e}")
    return f"{len(found)} cases: {', '.join(parts)}"
