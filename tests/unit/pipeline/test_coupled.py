"""Ranks that share a micro-batch begin it together."""

from __future__ import annotations

import dataclasses

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


def test_a_row_that_is_not_on_all_of_its_ranks_is_refused() -> None:
    wide = row(20, width=2)
    with pytest.raises(PlanError, match=r"micro-batch 0 of the ranks \(0, 1\)"):
        simulate(step((wide,), (row(3),)), layout=Layout(dp=2), cost=COST)
    with pytest.raises(PlanError, match=r"have M=\[1, 2\]"):
        simulate(step((wide,), (wide, row(3))), layout=Layout(dp=2), cost=COST)


@pytest.mark.parametrize(
    ("orders", "rank_makespans"),
    [
        # 10 and 2 seconds for the first row's F, B and W; the wide row takes 10, and back 20.
        (("0F0 1F0 0B0 0W0 1B0", "0F0 1F0 0B0 1B0 0W0"), (60.0, 62.0)),
        (("0F0 1F0 0B0 0W0 1B0", "0F0 1F0 0B0 0W0 1B0"), (60.0, 60.0)),
        (("0F0 1F0 0B0 1B0 0W0", "0F0 1F0 0B0 0W0 1B0"), (60.0, 50.0)),
        # Before the wide row's forward rank 0 ends at 20, and at 30 with its weight gradients.
        (("0F0 0B0 1F0 1B0 0W0", "0F0 0B0 0W0 1F0 1B0"), (60.0, 50.0)),
        (("0F0 0B0 0W0 1F0 1B0", "0F0 0B0 1F0 1B0 0W0"), (60.0, 62.0)),
    ],
)
def test_weight_gradients_wait_for_nobody(
    orders: tuple[str, ...], rank_makespans: tuple[float, ...]
) -> None:
    wide = row(20, width=2)
    shared = dataclasses.replace(
        step((row(10), wide), (row(2), wide)), orders=tuple((line,) for line in orders)
    )
    cost = dataclasses.replace(COST, weight_ratio=1.0)
    found = simulate(shared, layout=Layout(dp=2), cost=cost)
    assert found.rank_makespans == rank_makespans
    for rank, line in enumerate(orders):
        events = sorted((e.start, e.end, e) for e in found.events if e.rank == rank)
        assert " ".join(f"{e.microbatch}{e.kind}0" for *_, e in events) == line


def test_in_lockstep_all_ranks_begin_together() -> None:
    apart = dataclasses.replace(
        step((row(10), row(2)), (row(2), row(10))),
        orders=(("0F0 1F0 0B0 0W0 1B0 1W0",), ("0F0 1F0 0B0 1B0 0W0 1W0",)),
    )
    cost = dataclasses.replace(COST, weight_ratio=1.0)
    found = simulate(apart, layout=Layout(dp=2, ep=2), cost=cost, lockstep=True)
    # Each takes as long as the longer row, 10. Rank 1 waits while rank 0 runs 0W.
    assert found.rank_makespans == (60.0, 70.0)


def test_different_orders_of_ranks_that_wait_are_refused() -> None:
    wide = row(20, width=2)
    shared = dataclasses.replace(
        step((row(10), wide), (row(2), wide)),
        orders=(("0F0 1F0 0B0 1B0",), ("0F0 1F0 1B0 0B0",)),
    )
    with pytest.raises(PlanError, match=r"ranks 0 and 1 wait for each other and run their forward"):
        simulate(shared, layout=Layout(dp=2), cost=COST)
