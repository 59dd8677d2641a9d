"""The table of few row lengths: what `Policy.row_shapes` costs, and what graphs must gain."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from megapack import CostModel, Plan, Policy, check_plan, simulate
from tools.benching.planner_cases import Case, mean, plan_of

NUMBERS = (1, 2, 4, 8, 16)


class Cell(NamedTuple):
    """What a number of row lengths costs."""

    time: float
    """Simulated seconds over those of rows of any length."""
    padding: float
    """Row tokens over real ones, less 1."""
    gain: float
    """Tokens of fixed cost per micro-batch that graphs must save."""


def shapes_table(cases: Iterable[Case]) -> Iterator[str]:
    """Yield the lines of the table, a row per case, and the geometric means of each layout."""
    names = " | ".join(f"k={number}" for number in NUMBERS)
    yield f"| data | layout | model | padding, any length | {names} |"
    yield "|---" * (4 + len(NUMBERS)) + "|"
    by_layout: dict[str, list[list[Cell]]] = {}
    for case in cases:
        free, cells = _cells(case)
        by_layout.setdefault(case.layout_name, []).append(cells)
        text = " | ".join(f"{c.time:.3f}, {c.padding:.1%}, {c.gain:.0f}" for c in cells)
        names = f"{case.data} | {case.layout_name} | {case.model}"
        yield f"| {names} | {free:.1%} | {text} |"
    for layout, rows in by_layout.items():
        means = [
            f"**{mean([cell.time for cell in column]):.3f}**" for column in zip(*rows, strict=True)
        ]
        yield f"| geometric mean | {layout} | | | {' | '.join(means)} |"


def _cells(case: Case) -> tuple[float, list[Cell]]:
    """The padding of rows of any length, and the cell of each number."""
    half = case.lengths.size // 2
    lengths = case.lengths[half : 2 * half]
    free = _planned(case, lengths, None)
    free_s = _seconds(case, free, case.cost)
    cells = []
    for number in NUMBERS:
        plan = _planned(case, lengths, number)
        seconds = _seconds(case, plan, case.cost)
        dearer = replace(case.cost, fixed=2 * case.cost.fixed)
        per_fixed = (_seconds(case, plan, dearer) - seconds) / case.cost.fixed
        gain = (seconds - free_s) / per_fixed * case.layout.num_chunks / case.cost.per_token
        cells.append(Cell(seconds / free_s, _padding(plan), gain))
    return _padding(free), cells


def _planned(case: Case, lengths: np.ndarray, number: int | None) -> Plan:
    policy = Policy(row_shapes=number)
    plan = plan_of(replace(case, lengths=lengths), policy)
    check_plan(plan, lengths)
    return plan


def _seconds(case: Case, plan: Plan, cost: CostModel) -> float:
    return float(simulate(plan.steps[0], layout=case.layout, cost=cost).makespan)


def _padding(plan: Plan) -> float:
    return plan.counts.row_tokens / plan.counts.tokens - 1
