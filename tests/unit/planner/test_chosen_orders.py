"""What the stages of a rank choose to run: whatever the rows, the chains and the cap."""

from __future__ import annotations

import numpy as np
import pytest

from megapack import Layout
from megapack.base.arrays import Floats, Ints
from megapack.plan.order import (
    StepOrder,
    deep_warmup,
    group_table,
    interleave,
    operation_texts,
    stage_lists,
)
from megapack.plan.order_text import read_order
from megapack.planner import orders

pytestmark = pytest.mark.unit

SHAPES = [(1, 1, 1), (2, 1, 1), (4, 1, 1), (2, 2, 2), (2, 2, 3), (4, 2, 5)]


def orders_of(pp: int, vpp: int, group: int, *, cap: float, split: bool) -> orders.OwnOrders:
    return orders.OwnOrders(
        chunk_weights=np.ones(pp * vpp),
        chunk_kinds=np.zeros(pp * vpp, dtype=np.int64),
        pp=pp,
        vpp=vpp,
        group=group,
        p2p=0.01,
        cap=cap,
        warmup=deep_warmup(pp, vpp, group),
        alignment=1,
        least_piece=1,
        forward_only=False,
        backward_ratio=2.0,
        weight_ratio=0.5,
        split=split,
    )


def least_cap(pp: int, vpp: int, count: int, group: int, backwards: Ints, held: Floats) -> float:
    """What a stage holds if none runs further ahead than the last one."""
    warmup = np.full(pp, deep_warmup(pp, vpp, group)[-1])
    lists = stage_lists(warmup, vpp, count, group, False, backwards)
    columns, _ = interleave(*lists, pp, vpp)
    stage, microbatch, _, kind, _ = columns
    amounts = np.where(kind == 0, 1.0, -1.0) * held[microbatch]
    return float(max(np.cumsum(amounts[stage == s]).max() for s in range(pp)))


def seconds_of(order: StepOrder, times: orders._Times, own: orders.OwnOrders) -> float:
    """When the last operation ends: each begins once its stage and its input are ready."""
    free = np.zeros(own.pp)
    end = np.zeros(order.stage.size + 1)
    for op, (stage, microbatch, kind, source) in enumerate(
        zip(order.stage, order.microbatch, order.kind, order.waits_for, strict=True)
    ):
        ready = end[source] + own.p2p if source < order.stage.size else 0.0
        end[op] = max(free[stage], ready) + times.seconds[kind, microbatch]
        free[stage] = end[op]
    return float(free.max())


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("pp", "vpp", "group"), SHAPES)
def test_stages_end_within_the_cap_and_as_they_promised(
    pp: int, vpp: int, group: int, split: bool
) -> None:
    rng = np.random.default_rng(pp + 10 * vpp + 100 * group)
    layout = Layout(pp=pp, vpp=vpp, microbatch_group_size=group if vpp > 1 else None)
    for count in filter(layout.is_legal_count, range(1, 9)):
        held = rng.integers(1, 9, count).astype(float)
        turned = np.arange(count)
        chains = [range(0, min(2, count, group))] if vpp > 1 else [range(count // 2, count)]
        chains = [chain for chain in chains if len(chain) > 1]
        for chain in chains:
            turned[chain.start : chain.stop] = turned[chain.start : chain.stop][::-1]
        table = group_table(count, vpp, group)
        backwards = np.arange(count * vpp) + turned[table[0]] - table[0]
        forward = held / 10 + 0.1
        weights = forward * (0.7 if split else 0.0)
        times = orders._Times(np.stack([forward, 2 * forward - weights, weights]), held)
        least = least_cap(pp, vpp, count, group, backwards, held)
        for cap in (least, 1.3 * least, np.inf):
            own = orders_of(pp, vpp, group, cap=float(cap), split=split)
            ran = np.empty((pp, (2 + split) * count * vpp, 3), dtype=np.int64)
            seconds = orders._choose(own, times, backwards, ran)
            assert seconds == orders._choose(own, times, backwards, ran[:0])
            texts, _ = operation_texts(count, vpp)
            kind, microbatch, chunk = np.moveaxis(ran, -1, 0)
            lines = [" ".join(line) for line in texts[kind, chunk // pp, microbatch]]
            order = read_order(lines, vpp=vpp, num_microbatches=count, chains=chains)
            assert order.peak_live(held).max() <= cap
            assert seconds == pytest.approx(seconds_of(order, times, own))
