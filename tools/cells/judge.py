"""What became of a cell: right, wrong, or refused, and whether in one line before processes met."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LIMITS = {
    "gradient": 1e-5,
    "tensor": 1e-4,
    "norm": 1e-5,
    "weights": 1e-7,
    "loss": 1e-5,
    "output": 3e-5,
    "metric": 3e-5,
}
"""Largest errors of a right cell: of all gradients, of one tensor's, of the gradient norm and of
all weights, relative to the reference; of the loss and of metrics, relative to it or to 1; and the
largest difference of a log-prob or a value. A gradient whose norm is below `LEAST_NORM` is nearly
all cancellation, such as that of a KL in a second step, and counts as one of that norm."""
LEAST_NORM = 0.2
ACCEPTED = ("right", "wrong")
_ADVICE = re.compile(r"\b(set|leave|use|give|start|change|unset|name|choose)\b")
_ON_SOME_RANKS = re.compile(r"\d+ of \d+ ranks failed")
_NORMS = ("grad_norm", "critic_grad_norm", "updated", "critic_updated")


def judge(
    folder: Path, reference: Path | None, world: int, code: int, output: str
) -> dict[str, Any]:
    """The verdict on a cell that ended.

    Args:
        folder: of the cell, with the notes of its ranks.
        reference: the file of its reference; None if there is none.
        code, output: of its job.
    """
    paths = [folder / f"rank{rank}.json" for rank in range(world)]
    ranks = [json.loads(path.read_text()) for path in paths if path.exists()]
    codes = [rank["code"] for rank in ranks]
    if len(ranks) == world and not any(codes):
        if code:
            return {"verdict": "breaks NCCL's rules", "text": output[-2000:]}
        if reference is None:
            return {"verdict": "accepted without a reference"}
        return _compare(ranks, lines_of(reference.parent), lines_of(folder))
    text = "".join(rank["stderr"] for rank in ranks).strip()
    if codes != [2] * world:
        return {"verdict": "crash", "codes": codes, "text": (text or output)[-2000:]}
    lines = [line for line in text.splitlines() if not line.startswith("WARNING ")]
    # That samples have no plan is found when they are planned, by each rank for itself.
    is_late = ranks[0]["place"] == "met" or bool(_ON_SOME_RANKS.search(text))
    verdict = "refused" if len(lines) == 1 and not is_late else "refused late or in several lines"
    says = bool(re.search(r"\d", text) and _ADVICE.search(text))
    return {"verdict": verdict, "place": ranks[0]["place"], "says": says, "text": text[:2000]}


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """The metrics of a job's steps."""
    text = (folder / "runs/run/metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def _compare(
    ranks: Sequence[Mapping[str, Any]],
    expected: Sequence[Mapping[str, Any]],
    lines: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    errors = dict.fromkeys(LIMITS, 0.0)
    at: dict[str, str] = {}

    def note(name: str, error: float, place: str) -> None:
        if not error <= errors[name]:
            errors[name], at[name] = (error if error == error else math.inf), place

    for number, notes in enumerate(zip(*(rank["notes"] for rank in ranks), strict=True)):
        place = f"pass {number} ({notes[0]['kind']})"
        if any("errors" not in one for one in notes):
            return {"verdict": "other passes", "text": f"{place}: {_other(notes[0])}"}
        for kind, name in (("gradients", "gradient"), ("weights", "weights")):
            parts = [one["errors"][kind] for one in notes if kind in one["errors"]]
            squares = [
                sum(values) for values in zip(*(part["squares"] for part in parts), strict=True)
            ]
            if squares:
                note(name, math.sqrt(squares[0] / max(squares[1], LEAST_NORM**2)), place)
        for one in notes:
            gradients, outputs = one["errors"].get("gradients"), one["errors"].get("outputs")
            if gradients:
                worst, tensor = gradients["worst"]
                note("tensor", worst, f"{place}: {tensor}")
            note("output", outputs["largest"] if outputs else 0.0, place)
        _compare_metrics(notes[0], note, place)
    if len(lines) != len(expected):
        return {"verdict": "other passes", "text": f"{len(lines)} steps, not {len(expected)}"}
    for want, have in zip(expected, lines, strict=True):
        for name in (key for key in _NORMS if key in want):
            note(
                "norm",
                _distance(have.get(name), want[name], LEAST_NORM),
                f"step {want['step']} {name}",
            )
    wrong = {name: at[name] for name, error in errors.items() if error > LIMITS[name]}
    verdict = {"verdict": "wrong" if wrong else "right", **errors}
    return verdict | ({"text": json.dumps(wrong)} if wrong else {})


def _compare_metrics(one: Mapping[str, Any], note: Any, place: str) -> None:
    have, want = one.get("metrics"), one["expected"]["metrics"]
    for name in want or {}:
        # Policy and reference are equal in the first step of DPO: margins are rounding errors.
        if name != "preferred_fraction" or abs(want.get("margin", 1.0)) > 1e-3:
            kind = "loss" if name == "loss" else "metric"
            note(kind, _distance(have.get(name), want[name], 1.0), f"{place}: {name}")


def _other(one: Mapping[str, Any]) -> str:
    want = one["expected"]
    return f"samples {one['samples']}, not {want['samples']} of {want['kind']}"


def _distance(have: Any, want: Any, least: float) -> float:
    if have is None or want is None:
        return 0.0 if have is want else math.inf
    return abs(have - want) / max(abs(want), least)


def table(cells: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table of verdicts, and one of the largest errors of the accepted cells."""
    counts = Counter(cell["verdict"] for cell in cells)
    lines = ["| verdict | cells |", "|---|---|"]
    lines += [f"| {verdict} | {count} |" for verdict, count in counts.most_common()]
    refused = [cell for cell in cells if cell["verdict"] == "refused"]
    says = sum(cell["says"] for cell in refused)
    lines += [f"| refused, with a number and what to set | {says} |", ""]
    lines += ["| error | limit | largest of right cells | cell |", "|---|---|---|---|"]
    right = [cell for cell in cells if cell["verdict"] == "right"]
    for name, limit in LIMITS.items() if right else ():
        worst = max(right, key=lambda cell: cell[name])
        lines.append(f"| {name} | {limit:.0e} | {worst[name]:.1e} | {worst['cell']} |")
    return "\n".join(lines)
