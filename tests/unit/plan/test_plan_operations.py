"""Plans with pieces of samples and with orders: forms, counts, invariants 10 and 11, simulation."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from megapack.cost.model import CostModel
from megapack.errors import PlanError
from megapack.layout import Layout
from megapack.pipeline import simulate
from megapack.plan import MicroBatch, Part, Plan, StepPlan, check_plan
from megapack.plan.order import Chains, chain_order, step_order
from megapack.policy import Policy

LENGTHS = [10, 4, 20]
LAYOUT = Layout(pp=2)


def row(*samples: int, piece: tuple[int, int] | None = None) -> MicroBatch:
    before, end = piece or (0, LENGTHS[samples[0]])
    rest = [LENGTHS[i] for i in samples[1:]]
    tokens = end - before + sum(rest)
    tokens_sq = end**2 - before**2 + sum(n * n for n in rest)
    pieces = () if piece is None else (Part(samples[0], *piece),)
    return MicroBatch(samples, tokens, tokens, tokens_sq, tokens, pieces=pieces)


# Sample 2 in three pieces; sample 1 is whole in the row of the last one.
ROWS = (row(0), row(2, piece=(0, 8)), row(2, piece=(8, 16)), row(2, 1, piece=(16, 20)))


def lines(count: int = 4, chains: Chains = (range(1, 4),)) -> tuple[str, ...]:
    return chain_order(LAYOUT.pp, 1, count, 1, chains).lines()


def plan(rows: tuple[MicroBatch, ...] = ROWS, **changed: Any) -> Plan:
    orders = changed.pop("orders", (lines(),))
    step = StepPlan((rows,), len(rows), None, (0, 1, 2), (), orders)
    values: dict[str, Any] = {
        "steps": (step,),
        "layout": LAYOUT,
        "policy": Policy(split_samples="auto", backward="split"),
        "max_tokens_per_gpu": 20,
        "micro_batch_size": None,
        "num_samples": 3,
        "rollout_ids": None,
    }
    return Plan(**{**values, **changed})


def with_weights(order: tuple[str, ...]) -> tuple[str, ...]:
    """Weight gradients of micro-batch 0 at the end of each stage."""
    return tuple(f"{line} 0W0" for line in order)


def test_json_is_exact() -> None:
    for made in (plan(), plan(orders=(with_weights(lines()),))):
        check_plan(made, LENGTHS)
        assert Plan.from_json(made.to_json()) == made


def test_counts_have_each_sample_once() -> None:
    counts = plan().counts
    assert (counts.num_samples, counts.tokens, counts.num_rows) == (3, 34, 4)
    assert (counts.num_pieces, counts.num_split_samples, counts.piece_tokens) == (3, 1, 20)
    assert counts.piece_fraction == 20 / 34
    assert plan().steps[0].kept_samples == (0, 1, 2)
    assert plan().steps[0].chains(0) == [range(1, 4)]


def broken_rows(*rows: MicroBatch) -> dict[str, Any]:
    return {"rows": rows}


TWO = (row(2, piece=(0, 8)), row(2, piece=(8, 20)))
BROKEN: dict[str, tuple[str, dict[str, Any]]] = {
    "a gap": (
        r"10 .* have the pieces \[\(0, 8\), \(9, 20\)\] of sample 2, which has 20 tokens",
        broken_rows(row(2, piece=(0, 8)), row(2, piece=(9, 20)), row(0), row(1)),
    ),
    "an end too early": (
        r"10 .* of sample 2, which has 20 tokens",
        broken_rows(row(2, piece=(0, 8)), row(2, piece=(8, 16)), row(0), row(1)),
    ),
    "another row between": (
        r"10 .* of sample 2, which has 20 tokens",
        broken_rows(TWO[0], row(0), TWO[1], row(1)),
    ),
    "a piece that is not first": (
        r"10 .* have pieces that are not the first of their row",
        broken_rows(dataclasses.replace(TWO[0], samples=(0, 2)), TWO[1], row(1)),
    ),
    "split_samples=off": (r"10 .* with split_samples='off'", {"policy": Policy()}),
    "no budget": (
        r"10 .* with no budget",
        {"max_tokens_per_gpu": None, "micro_batch_size": 3},
    ),
    "a colocated set": (
        r"10 .* split sample 2, one of 2 in a colocated set",
        {"colocate_ids": (0, 1, 1)},
    ),
    "a piece over the budget": (
        r"4 .* holds 12 padded tokens of 1 samples, the budget is 10",
        {
            "rows": (*TWO, row(0), row(1)),
            "orders": (lines(chains=(range(2),)),),
            "max_tokens_per_gpu": 10,
            "policy": Policy(split_samples="auto", max_live_tokens_per_gpu=40),
        },
    ),
    "no order": (r"11 .* has pieces of samples and no order", {"orders": ()}),
    "the plain order": (
        r"11 .* rank 0: stage 0 cannot run 1B0: the backward of the next piece, 2B0 comes later",
        {"orders": (lines(chains=()),)},
    ),
    "one stage": (r"11 .* has orders of 1 stages", {"orders": (lines()[:1],)}),
    "backwards in a forward pass": (r"11 .* forward_only=True", {"forward_only": True}),
    "weights apart": (
        r"11 .* puts weight gradients off under backward='joint'",
        {
            "orders": (with_weights(lines()),),
            "policy": Policy(split_samples="auto"),
        },
    ),
    "over the cap": (
        r"11 .* holds 24 tokens per GPU on stage 0, the cap is 23",
        {"policy": Policy(split_samples="auto", max_live_tokens_per_gpu=23)},
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_invariants_10_and_11(name: str) -> None:
    message, changed = BROKEN[name]
    with pytest.raises(PlanError, match=f"invariant {message}"):
        check_plan(plan(**changed), LENGTHS)


def test_the_cap_is_what_full_rows_of_megatrons_order_hold() -> None:
    layout = Layout(pp=3, vpp=3)
    order = step_order(layout.pp, layout.vpp, 6, 3, False)
    full = MicroBatch((), 100, 0, 0, 0)
    capped = plan(layout=layout, max_tokens_per_gpu=100)
    step = dataclasses.replace(capped.steps[0], ranks=((full,) * 6,), group_size=3, orders=())
    # 11 rows of one chunk: 366.67 tokens of a stage, to the last bit.
    assert capped.live_cap(step) == order.peak_live(np.full(6, 100.0)).max() / layout.vpp


def test_damaged_cells_and_orders_are_refused() -> None:
    text = plan().to_json()
    for damaged in (
        text.replace("0,1,8,16]", "0,1,16,8]"),
        text.replace('"orders":[["0F0', '"orders":[[7,"0F0'),
    ):
        assert damaged != text
        with pytest.raises(PlanError, match="not a plan"):
            Plan.from_json(damaged)


def test_the_simulator_follows_the_order() -> None:
    made = plan(orders=(with_weights(lines()),))
    cost = CostModel(per_token=1.0, weight_ratio=0.5)
    simulation = simulate(made.steps[0], layout=LAYOUT, cost=cost)
    seen: dict[int, list[str]] = {0: [], 1: []}
    seconds = {}
    for event in sorted(simulation.events, key=lambda e: e.start):
        seen[event.stage].append(f"{event.microbatch}{event.kind}{event.chunk}")
        seconds[event.kind, event.microbatch] = event.end - event.start
    assert tuple(" ".join(ops) for ops in seen.values()) == made.steps[0].orders[0]
    # Half of the layers on each stage: row 0 of 10 tokens has F 5, B 10 less its W of 2.5.
    assert (seconds["F", 0], seconds["B", 0], seconds["W", 0]) == (5.0, 7.5, 2.5)
    assert seconds["B", 1] == 8.0
    assert simulation.peak_live_tokens == 34.0


def test_split_backwards_of_a_full_pipeline_are_faster() -> None:
    rows = (row(0),) * 4
    step = StepPlan((rows,), 4, None, (0,), ())
    cost = CostModel(per_token=1.0)
    joint = simulate(step, layout=LAYOUT, cost=cost).makespan
    order = (
        "0F0 1F0 0B0 2F0 0W0 1B0 3F0 1W0 2B0 2W0 3B0 3W0",
        "0F0 0B0 1F0 1B0 2F0 2B0 3F0 3B0 0W0 1W0 2W0 3W0",
    )
    split = simulate(dataclasses.replace(step, orders=(order,)), layout=LAYOUT, cost=cost).makespan
    # Equal rows: the bubble is (pp - 1) * (F + B + W) joint, (pp - 1) * (F + B - W) split.
    assert (joint, split) == (75.0, 70.0)
