"""Invariant 11: orders of operations."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np

from megapack.errors import PlanError
from megapack.plan.checks.reading import Reading, broken
from megapack.plan.order import without_weights

if TYPE_CHECKING:
    from megapack.plan.plan import StepPlan


def check_orders(read: Reading) -> None:
    """Raise PlanError if an order cannot run, holds too much, or ranks that meet differ in it."""
    plan = read.plan
    for where, step in read.steps:
        if not step.orders:
            if any(mb.pieces for mb in step.microbatches) and not plan.forward_only:
                raise broken(11, f"{where} has pieces of samples and no order")
            continue
        if plan.forward_only or len(step.orders) != len(step.ranks):
            raise broken(
                11,
                f"{where} has orders of {len(step.orders)} ranks, forward_only={plan.forward_only}",
            )
        cap = plan.live_cap(step)
        for rank in range(len(step.ranks)):
            _check_rank(read, step, rank, cap, f"{where} rank {rank}")
        for block in step.meeting_ranks(plan.row_layout):
            difference = _first_difference(step, block)
            if difference:
                raise broken(11, f"{where}: {difference}")


def _check_rank(read: Reading, step: StepPlan, rank: int, cap: float, where: str) -> None:
    layout = read.plan.row_layout
    if len(step.orders[rank]) != layout.pp:
        raise broken(11, f"{where} has orders of {len(step.orders[rank])} stages")
    try:
        order = step.order(rank, layout)
    except PlanError as error:
        raise broken(11, f"{where}: {error}") from None
    if order.has_weights and read.plan.policy.backward != "split":
        raise broken(11, f"{where} puts weight gradients off under backward='joint'")
    tokens = np.array([mb.row_tokens / (layout.cp * mb.width) for mb in step.ranks[rank]])
    live = order.peak_live(tokens) / layout.vpp
    if live.max() > cap:
        raise broken(
            11,
            f"{where} holds {live.max():.0f} tokens per GPU on stage {live.argmax()}, the cap is "
            f"{cap:.0f}",
        )


def _first_difference(step: StepPlan, block: range) -> str:
    """Where the forwards and backwards of a rank first differ from those of the first rank of the
    block; "" if they do not."""
    first = block[0]
    lines = [without_weights(line) for line in step.orders[first]]
    for rank in block[1:]:
        for stage, line in enumerate(step.orders[rank]):
            if without_weights(line) == lines[stage]:
                continue
            pairs = zip_longest(lines[stage].split(), without_weights(line).split())
            one, other = next(pair for pair in pairs if pair[0] != pair[1])
            return (
                f"ranks {first} to {block[-1]} share rows or exchange tokens of experts, and stage "
                f"{stage} of rank {first} runs {one} where that of rank {rank} runs {other}; give "
                "them one order, `chain_order` with the chains of all, joined where they meet"
            )
    return ""
