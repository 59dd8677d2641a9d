"""Local search on rows that hold pieces of long samples, and on stages that fill waits with W's.

The moves are those of `refine`, on the slowest rank: units change places in its order, and items
change rows. A unit is a row, or all rows of a chain, whose pieces stay in their rows. One more move
shifts the cut between two neighbouring pieces. A move is kept if the ranks that it changes are then
faster than the slowest rank was.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megapack.base.arrays import Ints
from megapack.base.jit import kernel
from megapack.base.loops import largest
from megapack.plan.order import group_table, interleave, stage_lists
from megapack.planner.refine import draw_exchange, fastest, next_random
from megapack.planner.state import RowCost, State, exchange, row_seconds, row_tokens, slowest
from megapack.planner.weight_fill import FillRules, Times, filled_seconds

# All constants of this module were chosen by hand. docs/planner.md measures the whole search.

# Start of the pseudo-random sequence, as in `refine`.
_SEED = 88172645463325252
# Of 10 kinds of moves, 0 to 2 change the order of the slowest rank, 3 to 5 exchange items between
# its rows, 6 exchanges items with a random rank, 7 with the fastest one, 8 and 9 shift a cut.
_KINDS = 10
_LAST_ORDER = 2
_LAST_OWN_ROWS = 5
_RANDOM_RANK = 6
_LAST_EXCHANGE = 7
# The search ends after 4 moves without a legal draw per simulation of the budget, and 64 more.
_MISSES_PER_SIMULATION = 4
_FREE_MISSES = 64
# A cut shifts by up to this part of the shorter piece: 1,024 of 8,192 tokens.
_SHIFT_PART = 8


class RowPieces(NamedTuple):
    """Pieces among a draft's I items and R rows."""

    start: Ints
    """int64 [I], see `items.Pieces`."""
    end: Ints
    """int64 [I]."""
    chain: Ints
    """int64 [I]."""
    chain_of: Ints
    """int64 [R]: the chain of each row; -1 for a row without a piece."""
    piece_of: Ints
    """int64 [R]: the item that is the row's piece; -1 without one."""


class Pipeline(NamedTuple):
    """How ranks run their operations, and what these cost."""

    rules: FillRules
    vpp: int
    group: int
    """G."""
    forward_only: bool
    lockstep: bool
    """Ranks wait for each other in every micro-batch."""
    alignment: int
    """Cuts are at multiples of so many tokens."""
    backward_ratio: float
    """Backward seconds over forward seconds, W included."""
    weight_ratio: float
    """Seconds of a W over those of the forward without attention; 0 if backwards are joint."""


class RankOrders(NamedTuple):
    """The operations of each rank; they change with the places of its chains."""

    ops: Ints
    """int64 [dp, most operations, 5], see `filled_seconds`."""
    num_ops: Ints
    """int64 [dp]."""
    turned: Ints
    """int64 [dp, M]: the micro-batch whose backward runs k-th among those of its chunk."""


class Rows(NamedTuple):
    """A draft that the search changes in place."""

    cost: RowCost
    pipeline: Pipeline
    state: State
    pieces: RowPieces
    orders: RankOrders


@kernel
def score_rows(rows: Rows) -> float:
    """Write all ranks' operations and seconds; returns the step's seconds."""
    state = rows.state
    for rank in range(state.counts.size):
        _set_order(rows, rank, _turned(rows, rank))
        state.seconds[rank] = _score_rank(rows, rank)
    return float(largest(state.seconds))


@kernel
def run_rank(rows: Rows, rank: int, rules: FillRules, ran: Ints, num_ran: Ints) -> float:
    """Simulated seconds of a rank, or of the step in lockstep; see `filled_seconds`."""
    state = rows.state
    pipeline = rows.pipeline
    count = state.counts[rank]
    times = Times(np.zeros(count), np.zeros(count), np.zeros(count), np.zeros(count))
    first = 0 if pipeline.lockstep else rank
    last = state.counts.size if pipeline.lockstep else rank + 1
    for k in range(count):
        for other in range(first, last):
            row = state.rows[other, k]
            tokens = state.tokens[row] if row >= 0 else 0
            tokens_sq = state.tokens_sq[row] if row >= 0 else 0
            num_samples = state.num_samples[row] if row >= 0 else 0
            seconds = row_seconds(rows.cost, tokens, tokens_sq, num_samples)
            times.forward[k] = max(times.forward[k], seconds)
            seconds = pipeline.weight_ratio * row_seconds(rows.cost, tokens, 0, num_samples)
            times.weights[k] = max(times.weights[k], seconds)
            times.held[k] = max(times.held[k], float(row_tokens(rows.cost, tokens)))
        whole = pipeline.backward_ratio * times.forward[k]
        times.weights[k] = min(times.weights[k], whole)
        times.backward[k] = whole - times.weights[k]
    if pipeline.forward_only:
        # Nothing is kept in a pass without backwards.
        times.held[:] = 0
    ops = rows.orders.ops[rank, : rows.orders.num_ops[rank]]
    return filled_seconds(rules, ops, times, ran, num_ran)


@kernel
def move_rows(rows: Rows, budget: int, passes: float) -> int:
    """Improve a scored draft in place by moves; returns the simulations spent.

    Args:
        budget: simulations to spend.
        passes: a rank's seconds over its micro-batches' forward seconds, without the bubble.
    """
    random = np.array([_SEED & 0xFFFFFFFFFFFF])
    most_misses = _MISSES_PER_SIMULATION * budget + _FREE_MISSES
    used = 0
    misses = 0
    while used < budget and misses < most_misses:
        slow = slowest(rows.state)
        kind = next_random(random, _KINDS)
        spent = 0
        if kind <= _LAST_ORDER:
            spent = _try_order(rows, random, slow)
        elif kind > _LAST_EXCHANGE:
            spent = _try_cut(rows, random, slow)
        else:
            other = slow
            if kind > _LAST_OWN_ROWS:
                other = fastest(rows.state)
                if kind == _RANDOM_RANK or other == slow:
                    other = next_random(random, rows.state.counts.size)
            spent = _try_exchange(rows, random, slow, other, passes)
        used += spent
        misses += 1 if spent == 0 else 0
    return used


@kernel
def _score_rank(rows: Rows, rank: int) -> float:
    pp = rows.pipeline.rules.pp
    ran = np.empty((pp, 2 * rows.orders.ops.shape[1] // pp), dtype=np.int64)
    return run_rank(rows, rank, rows.pipeline.rules, ran, np.empty(pp, dtype=np.int64))


@kernel
def _chain_at(rows: Rows, rank: int, position: int) -> int:
    """The chain of a rank's micro-batch; -1 without one."""
    row = rows.state.rows[rank, position]
    return int(rows.pieces.chain_of[row]) if row >= 0 else -1


@kernel
def _unit_end(rows: Rows, rank: int, position: int) -> int:
    """The position after the unit of a position."""
    chain = _chain_at(rows, rank, position)
    last = position + 1
    if chain >= 0:
        while last < rows.state.counts[rank] and _chain_at(rows, rank, last) == chain:
            last += 1
    return last


@kernel
def _unit_start(rows: Rows, rank: int, position: int) -> int:
    """The first position of the unit of a position."""
    chain = _chain_at(rows, rank, position)
    first = position
    if chain >= 0:
        while first > 0 and _chain_at(rows, rank, first - 1) == chain:
            first -= 1
    return first


@kernel
def _turned(rows: Rows, rank: int) -> Ints:
    """The micro-batch whose backward runs k-th: chains run theirs in reverse. int64 [M]."""
    count = rows.state.counts[rank]
    turned = np.arange(count)
    position = 0
    while position < count:
        last = _unit_end(rows, rank, position)
        for k in range(position, last):
            turned[k] = position + last - 1 - k
        position = last
    return turned


@kernel
def _set_order(rows: Rows, rank: int, turned: Ints) -> None:
    """Write a rank's operations."""
    pipeline = rows.pipeline
    count = turned.size
    pp = pipeline.rules.pp
    backwards = turned
    if pipeline.vpp > 1:
        table = group_table(count, pipeline.vpp, pipeline.group)
        backwards = np.arange(table.shape[1]) + turned[table[0]] - table[0]
    own, ends = stage_lists(
        pp, pipeline.vpp, count, pipeline.group, pipeline.forward_only, backwards
    )
    columns, _ = interleave(own, ends, pp, pipeline.vpp)
    num_ops = columns.shape[1]
    rows.orders.num_ops[rank] = num_ops
    rows.orders.turned[rank, :count] = turned
    for op in range(num_ops):
        for k in range(5):
            rows.orders.ops[rank, op, k] = columns[k, op]


@kernel
def _try_order(rows: Rows, random: Ints, rank: int) -> int:
    """Exchange two rows in a rank's order, or move a unit; kept if the rank is faster.

    Returns:
        Simulations spent: 0 or 1.
    """
    state = rows.state
    count = state.counts[rank]
    p = next_random(random, count)
    q = next_random(random, count)
    if p == q:
        return 0
    before = state.rows[rank, :count].copy()
    single = _chain_at(rows, rank, p) < 0 and _chain_at(rows, rank, q) < 0
    if next_random(random, 2) == 0 and single:
        state.rows[rank, p] = before[q]
        state.rows[rank, q] = before[p]
    else:
        _move_unit(rows, rank, p, q)
    turned_before = rows.orders.turned[rank, :count].copy()
    turned = _turned(rows, rank)
    moves_chain = not np.all(turned == turned_before)
    if moves_chain and not _are_in_groups(rows.pipeline, turned):
        state.rows[rank, :count] = before
        return 0
    if moves_chain:
        _set_order(rows, rank, turned)
    seconds = _score_rank(rows, rank)
    if seconds < state.seconds[rank]:
        state.seconds[rank] = seconds
        return 1
    state.rows[rank, :count] = before
    if moves_chain:
        _set_order(rows, rank, turned_before)
    return 1


@kernel
def _move_unit(rows: Rows, rank: int, p: int, q: int) -> None:
    """Move the unit of position p so that it begins at q, or before the chain that is there."""
    state = rows.state
    count = state.counts[rank]
    start = _unit_start(rows, rank, p)
    size = _unit_end(rows, rank, p) - start
    unit = state.rows[rank, start : start + size].copy()
    # Close the gap, and then open one at q.
    for k in range(start, count - size):
        state.rows[rank, k] = state.rows[rank, k + size]
    rest = count - size
    at = min(q, rest)
    while 0 < at < rest:
        chain = _chain_at(rows, rank, at)
        if chain < 0 or chain != _chain_at(rows, rank, at - 1):
            break
        at -= 1
    for k in range(rest - 1, at - 1, -1):
        state.rows[rank, k + size] = state.rows[rank, k]
    state.rows[rank, at : at + size] = unit


@kernel
def _are_in_groups(pipeline: Pipeline, turned: Ints) -> bool:
    """Whether each chain lies within a group of G micro-batches, where stages have several
    chunks."""
    if pipeline.vpp > 1:
        for k in range(turned.size):
            if turned[k] // pipeline.group != k // pipeline.group:
                return False
    return True


@kernel
def _try_exchange(rows: Rows, random: Ints, slow: int, other: int, passes: float) -> int:
    """Exchange items between rows of two ranks, or of one; kept if both are then faster than the
    slow one was.

    Returns:
        Simulations spent: 0, 1 or 2.
    """
    state = rows.state
    before = state.seconds[slow]
    wanted = (before - state.seconds[other]) / (2 * passes)
    a, b, row_a, row_b = draw_exchange(
        rows.cost, state, rows.pieces.chain, random, slow, other, wanted
    )
    if a < 0:
        return 0
    exchange(state, a, b, row_a, row_b)
    seconds = _score_rank(rows, slow)
    spent = 1
    if seconds < before:
        other_seconds = seconds
        if other != slow:
            other_seconds = _score_rank(rows, other)
            spent = 2
        if other_seconds < before:
            state.seconds[other] = other_seconds
            state.seconds[slow] = seconds
            return spent
    exchange(state, a, b, row_b, row_a)
    return spent


@kernel
def _try_cut(rows: Rows, random: Ints, rank: int) -> int:
    """Shift the cut between a piece and the next one; kept if the rank is faster.

    Returns:
        Simulations spent: 0 or 1.
    """
    state = rows.state
    pieces = rows.pieces
    row = state.rows[rank, next_random(random, state.counts[rank])]
    if row < 0 or pieces.piece_of[row] < 0:
        return 0
    a = pieces.piece_of[row]
    b = a + 1
    if b >= pieces.chain.size or pieces.chain[b] != pieces.chain[a]:
        return 0
    shorter = min(state.item_tokens[a], state.item_tokens[b])
    units = shorter // (_SHIFT_PART * rows.pipeline.alignment)
    if units < 1:
        return 0
    shift = (1 + next_random(random, units)) * rows.pipeline.alignment
    longer = state.row_of[a]
    if next_random(random, 2) == 0:
        shift = -shift
        longer = state.row_of[b]
    if state.tokens[longer] + abs(shift) > rows.cost.capacity:
        return 0
    _shift_cut(rows, a, b, shift)
    seconds = _score_rank(rows, rank)
    if seconds < state.seconds[rank]:
        state.seconds[rank] = seconds
    else:
        _shift_cut(rows, a, b, -shift)
    return 1


@kernel
def _shift_cut(rows: Rows, a: int, b: int, shift: int) -> None:
    """Give `shift` tokens of piece b to the piece a before it."""
    state = rows.state
    before = rows.pieces.end[a]
    after = before + shift
    squares = after * after - before * before
    rows.pieces.end[a] = after
    rows.pieces.start[b] = after
    for item, sign in ((a, 1), (b, -1)):
        row = state.row_of[item]
        state.item_tokens[item] += sign * shift
        state.item_tokens_sq[item] += sign * squares
        state.tokens[row] += sign * shift
        state.tokens_sq[row] += sign * squares
