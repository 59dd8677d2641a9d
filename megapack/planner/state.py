"""A draft of a step in arrays, its simulated seconds, and the moves of samples between its rows.

The compiled local search (`refine`) works on this state in place.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megapack.base.arrays import Floats, Ints
from megapack.base.jit import kernel
from megapack.pipeline.kernels import RankOps, peak_live, rank_seconds


class RowCost(NamedTuple):
    """Seconds of one chunk's forward of a row, and what a row may hold."""

    fixed: float
    per_token: float
    per_token_sq: float
    per_sample: float
    unit: int
    """Row alignment in tokens."""
    uniform_tokens: int
    """Length of every row; 0 for planned rows."""
    capacity: int
    """Padded tokens per row."""
    max_live: float
    """Row tokens that a stage may hold, chunks counting whole; 0 for no cap."""
    fixed_rows: bool
    """Samples stay in their rows: only ranks' orders are searched."""


class State(NamedTuple):
    """A draft in arrays that the search changes in place. I items, R rows, dp ranks, M places."""

    item_tokens: Ints
    """Per item: aligned tokens."""
    item_tokens_sq: Ints
    item_samples: Ints
    row_of: Ints
    next: Ints
    """Per item the next one of its row, -1 at the end."""
    head: Ints
    """Per row its first item."""
    tokens: Ints
    """Per row: aligned tokens."""
    tokens_sq: Ints
    samples: Ints
    num: Ints
    """Per row: items."""
    rows: Ints
    """[dp, M]: the row at each place, -1 for padding."""
    counts: Ints
    """[dp]: places of each rank."""
    seconds: Floats
    """[dp]: simulated seconds; all alike in lockstep."""


@kernel
def row_tokens(cost: RowCost, tokens: int) -> int:
    """A row's length, as `Layout.aligned_row_tokens` has it; a row without samples is one unit."""
    if cost.uniform_tokens > 0:
        return cost.uniform_tokens
    return max(-(-tokens // cost.unit) * cost.unit, cost.unit)


@kernel
def row_seconds(cost: RowCost, tokens: int, tokens_sq: int, samples: int) -> float:
    """One chunk's forward of a row; `samples` = 0 is a padding micro-batch."""
    work = cost.per_token * row_tokens(cost, tokens) + cost.per_token_sq * tokens_sq
    return cost.fixed + work + cost.per_sample * samples


@kernel
def place_seconds(cost: RowCost, state: State, rank: int, place: int) -> float:
    """The same for the row at a place."""
    row = state.rows[rank, place]
    if row < 0:
        return row_seconds(cost, 0, 0, 0)
    return row_seconds(cost, state.tokens[row], state.tokens_sq[row], state.samples[row])


@kernel
def score_rank(cost: RowCost, state: State, ops: RankOps, rank: int, lockstep: bool) -> float:
    """Simulated seconds of a rank, or in lockstep of the step; inf where the cap is broken."""
    count = state.counts[rank]
    forward = np.empty(count)
    for place in range(count):
        forward[place] = place_seconds(cost, state, rank, place)
        if lockstep:
            for other in range(state.counts.size):
                seconds = place_seconds(cost, state, other, place)
                forward[place] = max(forward[place], seconds)
    if cost.max_live > 0 and _live(cost, state, ops, rank) > cost.max_live:
        return np.inf
    return rank_seconds(ops, forward, np.empty(ops.stage.size))


@kernel
def ops_of(all_ops: RankOps, bounds: Ints, rank: int) -> RankOps:
    """A rank's operations among those of all ranks."""
    first = bounds[rank, 0]
    last = bounds[rank, 1]
    return RankOps(
        all_ops.stage[first:last],
        all_ops.microbatch[first:last],
        all_ops.backward[first:last],
        all_ops.waits_for[first:last],
        all_ops.scale[first:last],
        all_ops.pp,
        all_ops.p2p,
    )


@kernel
def _live(cost: RowCost, state: State, ops: RankOps, rank: int) -> float:
    amounts = np.empty(state.counts[rank])
    for place in range(amounts.size):
        row = state.rows[rank, place]
        tokens = state.tokens[row] if row >= 0 else 0
        amounts[place] = row_tokens(cost, tokens)
    return peak_live(ops, amounts)


@kernel
def slowest(state: State) -> int:
    worst = 0
    for rank in range(state.seconds.size):
        if state.seconds[rank] > state.seconds[worst]:
            worst = rank
    return worst


@kernel
def score_all(cost: RowCost, state: State, all_ops: RankOps, bounds: Ints, lockstep: bool) -> float:
    """Simulate every rank, write `state.seconds`, return the step's seconds."""
    for rank in range(state.counts.size):
        if lockstep and rank > 0:
            state.seconds[rank] = state.seconds[0]
        else:
            ops = ops_of(all_ops, bounds, rank)
            state.seconds[rank] = score_rank(cost, state, ops, rank, lockstep)
    return float(state.seconds[slowest(state)])


@kernel
def _unlink(state: State, item: int) -> None:
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
    """Take an item from its row to another one."""
    old = state.row_of[item]
    _unlink(state, item)
    state.tokens[old] -= state.item_tokens[item]
    state.tokens_sq[old] -= state.item_tokens_sq[item]
    state.samples[old] -= state.item_samples[item]
    state.num[old] -= 1
    state.next[item] = state.head[row]
    state.head[row] = item
    state.row_of[item] = row
    state.tokens[row] += state.item_tokens[item]
    state.tokens_sq[row] += state.item_tokens_sq[item]
    state.samples[row] += state.item_samples[item]
    state.num[row] += 1


@kernel
def fits(cost: RowCost, state: State, row: int, leaving: int, coming: int) -> bool:
    """Whether a row may change one item for another; -1 stands for none."""
    tokens = state.tokens[row]
    num = state.num[row]
    if leaving >= 0:
        tokens -= state.item_tokens[leaving]
        num -= 1
    if coming >= 0:
        tokens += state.item_tokens[coming]
        num += 1
    limit = cost.capacity
    if cost.uniform_tokens > 0:
        limit = min(limit, cost.uniform_tokens)
    return num >= 1 and (tokens <= limit or (num == 1 and cost.uniform_tokens == 0))


@kernel
def exchange(state: State, a: int, b: int, row_a: int, row_b: int) -> None:
    """Item a goes to row_b and b, where there is one, to row_a."""
    _move(state, a, row_b)
    if b >= 0:
        _move(state, b, row_a)
