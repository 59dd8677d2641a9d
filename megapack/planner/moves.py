"""Local search on a board: by moves for steps with a pipeline, else by the best exchanges.

With a pipeline, the slowest rank sets the step's time. A move puts an item of one of its rows into
another row, exchanges two items, changes the order of its rows, or shifts the cut between two
pieces. The move is kept if the ranks that it changes are then faster than the slowest rank was.
Moves come from a fixed pseudo-random sequence and the budget counts simulations, so that equal
inputs give equal plans. Pieces stay in their rows, and the rows of a chain change their places
together.

Without one, a rank's seconds are the sum of its rows' seconds, in any order. The best exchange of
items between the slowest rank and another one is found by bisection, because pseudo-random moves
stop improving much earlier.
"""

from __future__ import annotations

import numpy as np

from megapack.base.arrays import Floats, Ints
from megapack.base.jit import kernel
from megapack.base.loops import copy_into
from megapack.planner.board import (
    Board,
    chain_at,
    exchange,
    fastest,
    fits,
    item_seconds,
    row_seconds,
    shift_cut,
    slowest,
    unit_end,
)
from megapack.planner.clock import Clock, score_rank
from megapack.planner.own_orders import OwnOrders

# All constants of this module were chosen by hand. docs/planner.md measures the whole search.

# Start of the pseudo-random sequence, the usual seed of Marsaglia's xorshift64.
SEED = 88172645463325252 & 0xFFFFFFFFFFFF
# Of 8 kinds of moves, 0 to 2 change the order of the slowest rank, 3 to 5 exchange items between
# its rows, 6 exchanges items with a random rank, and 7 with the fastest one. Two more kinds shift a
# cut, where there may be pieces.
_KINDS = 8
_KINDS_WITH_CUTS = 10
_LAST_ORDER = 2
_LAST_OWN_ROWS = 5
_RANDOM_RANK = 6
_LAST_EXCHANGE = 7
# Exchanges with another rank that are drawn per move. The one nearest to the wanted shift is
# simulated: 0.1 s if the slowest rank takes 1.2 s and the other one 1.0 s. 64 draws take a fifth
# longer to plan 2,048 samples and give plans that are no better, by less than 0.1 %.
_DRAWS = 12
# Moves without a legal draw cost no simulation. The search ends after 4 of them per simulation of
# the budget, and 64 more: after 8,256 with a budget of 2,048.
_MISSES_PER_SIMULATION = 4
_FREE_MISSES = 64
# A cut shifts by up to this part of the shorter piece: 1,024 of 8,192 tokens.
_SHIFT_PART = 8
# Items of the other rank that are tried on either side of the best one, in case that one has no
# room.
_NEIGHBOURS = 4
# Stop if the slowest rank is this near to the fastest, 1 us in a step of 1 s.
_EVEN = 1e-6
# An exchange must shrink the gap by more than this, so that rounding in fp64 (1e-16 per operation)
# never looks like a gain.
_LEAST_GAIN = 1e-9


@kernel
def try_moves(board: Board, clock: Clock, own: OwnOrders | None, budget: int, passes: float) -> int:
    """Improve a scored board in place by moves; returns simulations spent.

    Args:
        budget: simulations to spend.
        passes: a rank's seconds over its micro-batches' forward seconds, without the bubble.
    """
    random = np.array([SEED])
    most_misses = _MISSES_PER_SIMULATION * budget + _FREE_MISSES
    used = 0
    misses = 0
    while used < budget and misses < most_misses:
        slow = slowest(board)
        if clock.lockstep:
            slow = next_random(random, board.rows.shape[0])
        kind = next_random(random, _KINDS if own is None else _KINDS_WITH_CUTS)
        if board.cost.fixed_rows:
            kind = 0
        if kind <= _LAST_ORDER:
            spent = _try_order(board, clock, own, random, slow)
        elif own is not None and kind > _LAST_EXCHANGE:
            spent = _try_cut(board, clock, own, random, slow)
        else:
            other = slow
            if kind > _LAST_OWN_ROWS:
                other = fastest(board)
                if kind == _RANDOM_RANK or clock.lockstep or other == slow:
                    other = next_random(random, board.rows.shape[0])
            spent = _try_exchange(board, clock, own, random, slow, other, passes)
        used += spent
        misses += 1 if spent == 0 else 0
    return used


@kernel
def next_random(random: Ints, limit: int) -> int:
    """The next number below `limit` of the linear congruential sequence of drand48.

    It is scaled from the upper 32 bits, as the lower bits repeat after few numbers.
    """
    # As plain Python, the product of ints has all its bits; compiled, it wraps, which changes bits
    # above the mask only.
    random[0] = (int(random[0]) * 25214903917 + 11) & 0xFFFFFFFFFFFF
    return int(((random[0] >> 16) * limit) >> 32)


@kernel
def _try_order(board: Board, clock: Clock, own: OwnOrders | None, random: Ints, rank: int) -> int:
    """Exchange two rows in a rank's order, or move one row or a chain; kept if the rank is faster.

    Returns:
        Simulations spent: 0 or 1.
    """
    count = board.rows.shape[1]
    p = next_random(random, count)
    q = next_random(random, count)
    if p == q:
        return 0
    before = board.rows[rank, :count].copy()
    single = chain_at(board, rank, p) < 0 and chain_at(board, rank, q) < 0
    # Which side of the coin moves a row is as docs/planner.md measured it, for each kind of order.
    moves = next_random(random, 2) == (0 if own is None else 1)
    if moves or not single:
        _move_unit(board, rank, p, q)
    else:
        board.rows[rank, p] = before[q]
        board.rows[rank, q] = before[p]
    seconds = score_rank(board, clock, own, rank)
    if seconds < board.seconds[rank]:
        _set_seconds(board, clock, rank, seconds)
        return 1
    copy_into(board.rows[rank], before)
    # A chain that left its group takes inf seconds, and no simulation.
    return 1 if seconds < np.inf else 0


@kernel
def _move_unit(board: Board, rank: int, p: int, q: int) -> None:
    """Move the unit of position p so that it begins at q, or before the chain that is there."""
    count = board.rows.shape[1]
    start = p
    while start > 0 and unit_end(board, rank, start - 1) > p:
        start -= 1
    size = unit_end(board, rank, p) - start
    unit = board.rows[rank, start : start + size].copy()
    # Close the gap, and then open one at q.
    for k in range(start, count - size):
        board.rows[rank, k] = board.rows[rank, k + size]
    rest = count - size
    at = min(q, rest)
    while 0 < at < rest:
        chain = chain_at(board, rank, at)
        if chain < 0 or chain != chain_at(board, rank, at - 1):
            break
        at -= 1
    for k in range(rest - 1, at - 1, -1):
        board.rows[rank, k + size] = board.rows[rank, k]
    copy_into(board.rows[rank, at:], unit)


@kernel
def _try_exchange(
    board: Board,
    clock: Clock,
    own: OwnOrders | None,
    random: Ints,
    slow: int,
    other: int,
    passes: float,
) -> int:
    """Exchange items between rows of two ranks, or of one.

    The exchange is kept if both ranks are then faster than the slow one was.

    Returns:
        Simulations spent: 0, 1 or 2.
    """
    wanted = (board.seconds[slow] - board.seconds[other]) / (2 * passes)
    a, b, row_a, row_b = _draw_exchange(board, random, slow, other, wanted)
    if a < 0:
        return 0
    exchange(board, a, b, row_a, row_b)
    seconds = score_rank(board, clock, own, slow)
    spent = 1
    if seconds < board.seconds[slow]:
        if other == slow or clock.lockstep:
            _set_seconds(board, clock, slow, seconds)
            return spent
        other_seconds = score_rank(board, clock, own, other)
        spent = 2
        if other_seconds < board.seconds[slow]:
            board.seconds[slow] = seconds
            board.seconds[other] = other_seconds
            return spent
    exchange(board, a, b, row_b, row_a)
    return spent


@kernel
def _set_seconds(board: Board, clock: Clock, rank: int, seconds: float) -> None:
    """Write a rank's seconds; in lockstep they are those of all ranks."""
    if clock.lockstep:
        for other in range(board.seconds.size):
            board.seconds[other] = seconds
    else:
        board.seconds[rank] = seconds


@kernel
def pick(board: Board, random: Ints, row: int) -> int:
    """A random item of a row."""
    item = board.head[row]
    for _ in range(next_random(random, board.num_items[row])):
        item = board.next[item]
    return int(item)


@kernel
def _relief(board: Board, row: int, leaving: int, coming: int) -> float:
    """Forward seconds that a row saves if one item leaves and another one comes (-1: no item)."""
    k = board.level[row]
    tokens = board.tokens[row] - board.item_tokens[k, leaving]
    tokens_sq = board.tokens_sq[row] - board.item_tokens_sq[k, leaving]
    num_samples = board.num_samples[row] - board.item_samples[leaving]
    if coming >= 0:
        tokens += board.item_tokens[k, coming]
        tokens_sq += board.item_tokens_sq[k, coming]
        num_samples += board.item_samples[coming]
    after = row_seconds(board.cost, k, tokens, tokens_sq, num_samples)
    return float(board.row_seconds[row] - after)


@kernel
def _draw_exchange(
    board: Board, random: Ints, slow: int, other: int, wanted: float
) -> tuple[int, int, int, int]:
    """Draw an exchange between two ranks that saves the slow one about `wanted` seconds.

    Returns:
        Items a and b, the row of a and the row of b. b is -1 if a moves and no item comes back; a
        is -1 if no draw was legal.
    """
    best = (-1, -1, -1, -1)
    nearest = np.inf
    for _ in range(_DRAWS):
        row_a = board.rows[slow, next_random(random, board.rows.shape[1])]
        row_b = board.rows[other, next_random(random, board.rows.shape[1])]
        if board.num_items[row_a] == 0 or board.num_items[row_b] == 0 or row_a == row_b:
            continue
        a = pick(board, random, row_a)
        b = -1
        # One draw in three moves an item without an exchange.
        if next_random(random, 3) > 0:
            b = pick(board, random, row_b)
        if board.chain[a] >= 0 or (b >= 0 and board.chain[b] >= 0):
            continue
        if not (fits(board, row_a, 0, a, b) and fits(board, row_b, 0, b, a)):
            continue
        miss = abs(_relief(board, row_a, a, b) - wanted)
        if miss < nearest:
            nearest = miss
            best = (a, b, row_a, row_b)
        if slow == other:
            break  # Within a rank no shift of seconds is wanted, so any exchange will do.
    return best


@kernel
def _try_cut(board: Board, clock: Clock, own: OwnOrders, random: Ints, rank: int) -> int:
    """Shift the cut between a piece and the next one; kept if the rank is faster.

    Returns:
        Simulations spent: 0 or 1.
    """
    row = board.rows[rank, next_random(random, board.rows.shape[1])]
    a = board.piece_of[row]
    b = a + 1
    if a < 0 or b >= board.chain.size or board.chain[b] != board.chain[a]:
        return 0
    unit = own.alignment
    units = min(board.item_tokens[0, a], board.item_tokens[0, b]) // (_SHIFT_PART * unit)
    if units < 1:
        return 0
    shift = (1 + next_random(random, units)) * unit
    longer, shorter = a, b
    if next_random(random, 2) == 0:
        shift = -shift
        longer, shorter = b, a
    if board.tokens[board.row_of[longer]] + abs(shift) > board.cost.capacity[0]:
        return 0
    if board.item_tokens[0, shorter] - abs(shift) < own.least_piece:
        return 0
    shift_cut(board, a, shift)
    seconds = score_rank(board, clock, own, rank)
    if seconds < board.seconds[rank]:
        board.seconds[rank] = seconds
    else:
        shift_cut(board, a, -shift)
    return 1


@kernel
def even_ranks(board: Board, budget: int, passes: float) -> int:
    """Exchange items between the slowest rank and others, then between these, until nothing helps.

    Args:
        budget: pairs of ranks that may be tried.
        passes: a rank's seconds over its micro-batches' forward seconds.

    Returns:
        Pairs of ranks tried.
    """
    used = 0
    improved = True
    while improved and used < budget:
        improved = False
        rising = np.argsort(board.seconds, kind="mergesort")
        slow = rising[-1]
        if board.seconds[slow] - board.seconds[rising[0]] < _EVEN * board.seconds[slow]:
            break
        # The slowest rank first. If it finds no exchange, exchanges between other ranks may leave
        # these with items that help it.
        for i in range(rising.size - 1, 0, -1):
            for j in range(i):
                if not improved and used < budget:
                    used += 1
                    improved = _narrow(board, rising[i], rising[j], passes)
    return used


@kernel
def _narrow(board: Board, slow: int, other: int, passes: float) -> bool:
    """Make the best exchange between two ranks; returns whether the slow one is then faster."""
    gap = (board.seconds[slow] - board.seconds[other]) / passes
    a, b, row_b = _best_exchange(board, slow, other, gap)
    if a < 0:
        return False
    row_a = board.row_of[a]
    exchange(board, a, b, row_a, row_b)
    seconds = passes * _forward_seconds(board, slow)
    other_seconds = passes * _forward_seconds(board, other)
    # Row lengths are rounded up to the alignment, so that an exchange may gain nothing.
    if max(seconds, other_seconds) >= board.seconds[slow]:
        exchange(board, a, b, row_b, row_a)
        return False
    board.seconds[slow] = seconds
    board.seconds[other] = other_seconds
    return True


@kernel
def _best_exchange(board: Board, slow: int, other: int, gap: float) -> tuple[int, int, int]:
    """The exchange that comes nearest to halving the gap between two ranks.

    With a gap of 10, the best partner of an item of 7 is an item of 2: the exchange shifts 5.

    Returns:
        Items a and b, and the row of the other rank. b is -1 if a moves and no item comes back; a
        is -1 if no exchange makes the gap smaller.
    """
    items_a = _items(board, slow)
    items_b = _items(board, other)
    seconds_a = _seconds(board, items_a)
    seconds_b = _seconds(board, items_b)
    rising = np.argsort(seconds_b, kind="mergesort")
    seconds_b = seconds_b[rising]
    items_b = items_b[rising]
    roomiest = _roomiest(board, other)
    nearest = gap / 2 * (1 - _LEAST_GAIN)
    best = (-1, -1, -1)
    for k in range(items_a.size):
        a = items_a[k]
        row_a = board.row_of[a]
        wanted = seconds_a[k] - gap / 2
        alone = roomiest >= 0 and fits(board, row_a, 0, a, -1)
        if alone and abs(wanted) < nearest and fits(board, roomiest, 0, -1, a):
            nearest = abs(wanted)
            best = (a, -1, roomiest)
        middle = np.searchsorted(seconds_b, wanted)
        for j in range(max(middle - _NEIGHBOURS, 0), min(middle + _NEIGHBOURS, seconds_b.size)):
            if abs(seconds_b[j] - wanted) < nearest:
                b = items_b[j]
                row_b = board.row_of[b]
                if fits(board, row_a, 0, a, b) and fits(board, row_b, 0, b, a):
                    nearest = abs(seconds_b[j] - wanted)
                    best = (a, b, row_b)
    return best


@kernel
def _items(board: Board, rank: int) -> Ints:
    """Items of a rank, row after row."""
    size = 0
    for position in range(board.rows.shape[1]):
        row = board.rows[rank, position]
        size += board.num_items[row]
    out = np.empty(size, dtype=np.int64)
    k = 0
    for position in range(board.rows.shape[1]):
        item = board.head[board.rows[rank, position]]
        while item >= 0:
            out[k] = item
            k += 1
            item = board.next[item]
    return out


@kernel
def _seconds(board: Board, items: Ints) -> Floats:
    """`item_seconds` of each."""
    out = np.empty(items.size)
    for k in range(items.size):
        out[k] = item_seconds(board, items[k])
    return out


@kernel
def _roomiest(board: Board, rank: int) -> int:
    """The rank's row with the fewest tokens; -1 if it has only padding."""
    best = -1
    for position in range(board.rows.shape[1]):
        row = board.rows[rank, position]
        if board.num_items[row] > 0 and (best < 0 or board.tokens[row] < board.tokens[best]):
            best = row
    return best


@kernel
def _forward_seconds(board: Board, rank: int) -> float:
    """Seconds of one chunk's forwards of all micro-batches of a rank."""
    seconds = 0.0
    for position in range(board.rows.shape[1]):
        seconds += board.row_seconds[board.rows[rank, position]]
    return seconds
