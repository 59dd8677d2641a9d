"""Ranks that share rows, or exchange tokens of experts, run forwards and backwards in one order."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from megapack.errors import PlanError
from megapack.layout import Layout
from megapack.pipeline.simulator import simulate_planned
from megapack.plan import Plan, StepPlan, check_plan
from megapack.plan.order import chain_order
from megapack.policy import Policy
from tests.hand_made_orders import joined_chains, with_weights_later
from tests.made_rows import Slot, made_ranks

LENGTHS = [97, 12, 40, 64, 7, 21]
CHAINS: list[Slot] = [
    [(1, [0], {0: (0, 32)}), (1, [1])],
    [(1, [0], {0: (32, 64)}), (1, [3, 4], {3: (0, 40)})],
    [(1, [0], {0: (64, 97)}), (1, [3], {3: (40, 64)})],
]
WIDE: list[Slot] = [*CHAINS, [(2, [2, 5])]]
EXPERTS: list[Slot] = [*CHAINS, [(1, [2]), (1, [5])]]
CASES = {
    "wide rows": (WIDE, Layout(dp=2, pp=2), "dynamic"),
    "experts": (EXPERTS, Layout(dp=2, pp=2, ep=2), "fixed"),
}


def plan(name: str, *, joined: bool = True) -> Plan:
    """A plan whose ranks have chains of their own, in one order of the joined chains."""
    slots, layout, context_parallel = CASES[name]
    ranks = made_ranks(slots, LENGTHS, layout)
    step = StepPlan(ranks, len(slots), None, tuple(range(6)), ())
    chains = [step.chains(rank) for rank in range(2)]
    assert chains == [[range(0, 3)], [range(1, 3)]]
    if joined:
        chains = [joined_chains(itertools.chain(*chains))] * 2
    orders = tuple(chain_order(2, 1, len(slots), 1, own).lines() for own in chains)
    return Plan(
        steps=(dataclasses.replace(step, orders=orders),),
        layout=layout,
        policy=Policy(
            split_samples="auto",
            context_parallel=context_parallel,
            max_live_tokens_per_gpu=400,
        ),
        max_tokens_per_gpu=64,
        micro_batch_size=None,
        num_samples=6,
        rollout_ids=None,
    )


@pytest.mark.parametrize("name", CASES)
def test_one_order_of_the_joined_chains_is_legal(name: str) -> None:
    made = plan(name)
    for one in (made, with_weights_later(made, 0)):
        check_plan(one, LENGTHS)
        assert Plan.from_json(one.to_json()) == one
        (step,) = one.steps
        assert step.meeting_ranks(one.layout) == [range(2)]
        assert simulate_planned(one, step, None).makespan > 0
    # Each rank's weight gradients are at other places.
    assert len(set(one.steps[0].orders)) == 2


@pytest.mark.parametrize("name", CASES)
def test_an_order_of_each_rank_is_refused(name: str) -> None:
    made = plan(name, joined=False)
    message = (
        "invariant 11 is broken: step 0: ranks 0 to 1 share rows or exchange tokens of experts, "
        "and stage 0 of rank 0 runs 2F0 where that of rank 1 runs 0B0; give them one order"
    )
    with pytest.raises(PlanError, match=message):
        check_plan(made, LENGTHS)
    with pytest.raises(PlanError, match="wait for each other and run their forwards and backwards"):
        simulate_planned(made, made.steps[0], None)


def test_ranks_that_never_meet_have_orders_of_their_own() -> None:
    made = plan("experts", joined=False)
    made = dataclasses.replace(made, layout=Layout(dp=2, pp=2))
    check_plan(made, LENGTHS)
    (step,) = made.steps
    assert step.meeting_ranks(made.layout) == [range(1), range(1, 2)]


def with_slots(slots: list[Slot], layout: Layout) -> Plan:
    """The plan of wide rows with other rows, in the order of each block's joined chains."""
    made = plan("wide rows")
    step = dataclasses.replace(made.steps[0], ranks=made_ranks(slots, LENGTHS, layout))
    orders: list[tuple[str, ...]] = []
    for block in step.meeting_ranks(layout):
        chains = joined_chains(itertools.chain(*map(step.chains, block)))
        orders += [chain_order(layout.pp, 1, len(slots), 1, chains).lines()] * len(block)
    step = dataclasses.replace(step, orders=tuple(orders))
    return dataclasses.replace(made, steps=(step,), layout=layout)


OVER_TWO: list[Slot] = [[(2, [0], {0: (0, 64)})], [(2, [0], {0: (64, 97)})]]
OTHERS: list[Slot] = [[(2, [2, 5])], [(1, [3]), (1, [1, 4])]]


def test_a_chain_lies_over_the_same_ranks() -> None:
    layout = Layout(dp=2, pp=2)
    made = with_slots([*OVER_TWO, *OTHERS], layout)
    check_plan(made, LENGTHS)
    over_one: Slot = [(1, [0], {0: (64, 97)}), (1, [])]
    with pytest.raises(PlanError, match=r"10 .* are a chain, and lie over the DP ranks \[\(\), \("):
        check_plan(with_slots([OVER_TWO[0], over_one, *OTHERS], layout), LENGTHS)
    odd: list[Slot] = [[(2, [0], {0: (0, 62)})], [(2, [0], {0: (62, 97)})]]
    with pytest.raises(PlanError, match=r"10 .* end at \[62, 97\], not at multiples of 4"):
        check_plan(with_slots([*odd, *OTHERS], layout), LENGTHS)


def test_blocks_of_ranks_have_orders_of_their_own() -> None:
    layout = Layout(dp=4, pp=2)
    slots: list[Slot] = [
        [*OVER_TWO[0], (1, [3], {3: (0, 40)}), (1, [1])],
        [*OVER_TWO[1], (1, [3], {3: (40, 64)}), (1, [2])],
        [(2, [5]), (1, []), (1, [4])],
    ]
    slots.append([(1, [])] * 4)
    made = with_slots(slots, layout)
    (step,) = made.steps
    assert step.meeting_ranks(layout) == [range(2), range(2, 3), range(3, 4)]
    assert step.orders[1] != step.orders[3]
    check_plan(made, LENGTHS)
    simulation = simulate_planned(made, step, None)
    # Each block takes as long as it would alone.
    for rank in (2, 3):
        alone = dataclasses.replace(step, ranks=(step.ranks[rank],), orders=(step.orders[rank],))
        one = dataclasses.replace(made, layout=Layout(pp=2), steps=(alone,))
        seconds = simulate_planned(one, alone, None).makespan
        assert simulation.rank_makespans[rank] == seconds


def test_ranks_that_share_rows_with_a_third_one_are_in_its_block() -> None:
    layout = Layout(dp=8)
    slots: list[Slot] = [
        [(2, [0]), (2, [1]), (1, [2]), (1, [3]), (2, [4])],
        [(4, [5]), (1, []), (1, []), (1, []), (1, [])],
    ]
    step = StepPlan(made_ranks(slots, LENGTHS, layout), 2, None, tuple(range(6)), ())
    wanted = [range(4), range(4, 5), range(5, 6), range(6, 8)]
    assert step.meeting_ranks(layout) == wanted
    assert step.meeting_ranks(Layout(dp=8, ep=8)) == [range(8)]
