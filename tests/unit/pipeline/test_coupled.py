"""Ranks that share a micro-batch begin it together."""

from __future__ import annotations

import pytest

from megapack.cost.model import CostModel
from megapack.errors import PlanError
from megapack.layout import Layout
from megapack.pipeline import simulate
from megapack.plan import MicroBatch, StepPlan

COST = CostModel(per_token=1.0, cp_overhead=0.0)


def row(tokens: int, first: int = 0, width: int = 1) -> MicroBatch:
    ranks = tuple(range(first, first + width)) if width > 1 else ()
    return MicroBatch((0,), tokens, tokens, 0, tokens, 0, ranks)


def step(*ranks: tuple[MicroBatch, ...]) -> StepPlan:
    return StepPlan(ranks, len(ranks[0]), None, (0,), ())


def test_a_rank_waits_for_the_one_that_it_shares_a_row_with() -> None:
    wide = row(20, width=2)
    shared = step((row(10), wide), (row(2), wide), (row(3), row(3)))
    found = simulate(shared, layout=Layout(dp=3), cost=COST)
    # Forward and backward of the first row take 30 and 6; then 30 for half of the wide one.
    assert found.rank_makespans == (60.0, 60.0, 18.0)
    starts = [e.start for e in found.events if e.microbatch == 1 and e.kind == "F"]
    assert starts == [30.0, 30.0, 9.0]


def test_a_shared_row_costs_its_part_and_the_overhead() -> None:
    wide = row(20, width=2)
    cost = CostModel(per_token=1.0, fixed=1.0, cp_overhead=0.5)
    found = simulate(step((wide,), (wide,)), layout=Layout(dp=2), cost=cost)
    assert found.makespan == pytest.approx(3 * (1 + 1.5 * 20 / 2))
    assert found.peak_live_tokens == 10


def test_waiting_is_stage_by_stage() -> None:
    # On two stages rank 1's first rows delay its part of the wide row, and so rank 0.
    wide = row(8, width=2)
    layout = Layout(dp=2, pp=2)
    apart = simulate(step((row(2), wide), (row(2), wide)), layout=layout, cost=COST)
    late = simulate(step((row(2), wide), (row(20), wide)), layout=layout, cost=COST)
    assert late.rank_makespans[0] > apart.rank_makespans[0]
    by_rank = [
        [(e.stage, e.kind, e.start, e.end) for e in late.events if (e.rank, e.microbatch) == (r, 1)]
        for r in range(2)
    ]
    assert by_rank[0] == by_rank[1]


def test_a_row_that_is_not_on_all_of_its_ranks_is_refused() -> None:
    wide = row(20, width=2)
    with pytest.raises(PlanError, match=r"micro-batch 0 of the ranks \(0, 1\)"):
        simulate(step((wide,), (row(3),)), layout=Layout(dp=2), cost=COST)
    with pytest.raises(PlanError, match=r"have M=\[1, 2\]"):
        simulate(step((wide,), (wide, row(3))), layout=Layout(dp=2), cost=COST)
