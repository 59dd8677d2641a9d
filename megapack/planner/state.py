"""A draft of a step in arrays, its simulated seconds, and exchanges of items between its rows.

The compiled local search (`refine`) changes this state in place.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megapack.base.arrays import Floats, Ints
from megapack.base.jit import kernel
from megapack.pipeline.kernels import RankOps, peak_live, rank_seconds


class RowCost(NamedTuple):
    """The seconds of one chunk's forward of a row, and limits of a row.

    seconds = fixed + per_token * row tokens + per_token_sq * tokens_sq + per_sample * samples
    """

    fixed: float
    per_token: float
    per_token_sq: float
    per_sample: float
    unit: int
    """Row alignment in tokens."""
    uniform_tokens: int
    """Length of all rows under row_shape="uniform"; 0 under "planned"."""
    capacity: int
    """Padded tokens that a row may hold."""
    max_live: float
    """Row tokens whose activations a stage may hold, each chunk counted whole; 0 without a cap."""
    fixed_rows: bool
    """Items stay in their rows, and only the order of each rank is searched."""


class State(NamedTuple):
    """A draft in arrays that the search changes in place: I items, R rows, dp ranks, at most M
    micro-batches per rank."""

    item_tokens: Ints
    """[I]: aligned tokens."""
    item_tokens_sq: Ints
    """[I]: sum of squared aligned lengths."""
    item_samples: Ints
    """[I]: number of samples."""
    row_of: Ints
    """[I]: the item's row."""
    next: Ints
    """[I]: the next item of the same row; -1 at the end. The items of a row are a linked list."""
    head: Ints
    """[R]: the row's first item."""
    tokens: Ints
    """[R]: aligned tokens."""
    tokens_sq: Ints
    """[R]: sum of squared aligned lengths."""
    num_samples: Ints
    """[R]: number of samples."""
    num_items: Ints
    """[R]: number of items."""
    rows: Ints
    """[dp, M]: each micro-batch's row; -1 for padding."""
    counts: Ints
    """[dp]: micro-batches of each rank."""
    seconds: Floats
    """[dp]: simulated seconds; the same for all ranks in lockstep."""


@kernel
def row_tokens(cost: RowCost, tokens: int) -> int:
    """Length of a row, as in `Layout.aligned_row_tokens`; a padding micro-batch has one unit."""
    if cost.uniform_tokens > 0:
        return cost.uniform_tokens
    return max(-(-tokens // cost.unit) * cost.unit, cost.unit)


@kernel
def row_seconds(cost: RowCost, tokens: int, tokens_sq: int, num_samples: int) -> float:
    """Seconds of one chunk's forward of a row; a padding micro-batch has 0, 0, 0."""
    work = cost.per_token * row_tokens(cost, tokens) + cost.per_token_sq * tokens_sq
    return cost.fixed + work + cost.per_sample * num_samples


@kernel
def microbatch_seconds(cost: RowCost, state: State, rank: int, position: int) -> float:
    """Seconds of one chunk's forward of a rank's micro-batch."""
    row = state.rows[rank, position]
    if row < 0:
        return row_seconds(cost, 0, 0, 0)
    return row_seconds(cost, state.tokens[row], state.tokens_sq[row], state.num_samples[row])


@kernel
def score_rank(cost: RowCost, state: State, ops: RankOps, rank: int, lockstep: bool) -> float:
    """Simulated seconds of a rank, or of the step in lockstep; inf above the cap on live tokens.

    In lockstep each micro-batch takes as long as on the slowest rank.
    """
    count = state.counts[rank]
    forward = np.empty(count)
    for position in range(count):
        forward[position] = microbatch_seconds(cost, state, rank, position)
        if lockstep:
            for other in range(state.counts.size):
                seconds = microbatch_seconds(cost, state, other, position)
                forward[position] = max(forward[position], seconds)
    if cost.max_live > 0 and _live(cost, state, ops, rank) > cost.max_live:
        return np.inf
    return rank_seconds(ops, forward, np.empty(ops.stage.size))


@kernel
def ops_of(all_ops: RankOps, bounds: Ints, rank: int) -> RankOps:
    """The operations of one rank: those from bounds[rank, 0] to bounds[rank, 1]."""
    first = bounds[rank, 0]
    last = bounds[rank, 1]
    return RankOps(
        all_ops.stage[first:last],
        all_ops.microbatch[first:last],
        all_ops.held[first:last],
        all_ops.waits_for[first:last],
        all_ops.scale[first:last],
        all_ops.pp,
        all_ops.p2p,
    )


@kernel
def _live(cost: RowCost, state: State, ops: RankOps, rank: int) -> float:
    """Peak of the row tokens whose activations a stage holds, each chunk counted whole."""
    amounts = np.empty(state.counts[rank])
    for position in range(amounts.size):
        row = state.rows[rank, position]
        tokens = state.tokens[row] if row >= 0 else 0
        amounts[position] = row_tokens(cost, tokens)
    return peak_live(ops, amounts)


@kernel
def slowest(state: State) -> int:
    """The rank with the most simulated seconds; the first one if ranks are equal."""
    worst = 0
    for rank in range(state.seconds.size):
        if state.seconds[rank] > state.seconds[worst]:
            worst = rank
    return worst


@kernel
def score_all(cost: RowCost, state: State, all_ops: RankOps, bounds: Ints, lockstep: bool) -> float:
    """Simulate every rank and write `state.seconds`; returns the step's seconds."""
    for rank in range(state.counts.size):
        if lockstep and rank > 0:
            state.seconds[rank] = state.seconds[0]
        else:
            ops = ops_of(all_ops, bounds, rank)
            state.seconds[rank] = score_rank(cost, state, ops, rank, lockstep)
    return float(state.seconds[slowest(state)])


@kernel
def fill_rows(state: State) -> None:
    """Link the items of each row, in ascending order, and add up their sizes."""
    for item in range(state.row_of.size - 1, -1, -1):
        row = state.row_of[item]
        state.next[item] = state.head[row]
        state.head[row] = item
        state.tokens[row] += state.item_tokens[item]
        state.tokens_sq[row] += state.item_tokens_sq[item]
        state.num_samples[row] += state.item_samples[item]
        state.num_items[row] += 1


@kernel
def _unlink(state: State, item: int) -> None:
    """Take an item out of its row's linked list."""
    row = state.row_of[item]
    at = state.head[row]
    if at == item:
        state.head[row] = state.next[item]
        return
    while state.next[at] != item:
        at = state.next[at]
    state.next[at] = state.next[item]


@kernel
def _move(state: State, item: int, row: int) -> None:
    """Move an item from its row to another one."""
    old = state.row_of[item]
    _unlink(state, item)
    state.tokens[old] -= state.item_tokens[item]
    state.tokens_sq[old] -= state.item_tokens_sq[item]
    state.num_samples[old] -= state.item_samples[item]
    state.num_items[old] -= 1
    state.next[item] = state.head[row]
    state.head[row] = item
    state.row_of[item] = row
    state.tokens[row] += state.item_tokens[item]
    state.tokens_sq[row] += state.item_tokens_sq[item]
    state.num_samples[row] += state.item_samples[item]
    state.num_items[row] += 1


@kernel
def fits(cost: RowCost, state: State, row: int, leaving: int, coming: int) -> bool:
    """Whether a row stays legal after one item leaves and another one comes; -1 means no item.

    A row keeps at least one item, and respects the capacity unless its only item is larger.
    """
    tokens = state.tokens[row]
    num_items = state.num_items[row]
    if leaving >= 0:
        tokens -= state.item_tokens[leaving]
        num_items -= 1
    if coming >= 0:
        tokens += state.item_tokens[coming]
        num_items += 1
    limit = cost.capacity
    if cost.uniform_tokens > 0:
        limit = min(limit, cost.uniform_tokens)
    oversize = num_items == 1 and cost.uniform_tokens == 0
    return num_items >= 1 and (tokens <= limit or oversize)


@kernel
def exchange(state: State, a: int, b: int, row_a: int, row_b: int) -> None:
    """Move item a to row_b, and item b to row_a; b = -1 means that no item comes back."""
    _move(state, a, row_b)
    if b >= 0:
        _move(state, b, row_a)
