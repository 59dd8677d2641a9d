"""Local search on a board by the best exchanges, for steps without a pipeline.

A rank's seconds are the sum of its rows' seconds, in any order. The best exchange of items between
the slowest rank and another one is found by bisection, because pseudo-random moves stop improving
much earlier.
"""

from __future__ import annotations

import numpy as np

from megapack.base.arrays import Floats, Ints
from megapack.base.jit import kernel
from megapack.planner.board import Board, exchange, fits, item_seconds

# All constants of this module were chosen by hand. docs/planner.md measures the whole search.

# Items of the other rank that are tried on either side of the best one, in case that one has no
# room.
_NEIGHBOURS = 4
# Stop if the slowest rank is this near to the fastest, 1 us in a step of 1 s.
_EVEN = 1e-6
# An exchange must shrink the gap by more than this, so that rounding in fp64 (1e-16 per operation)
# never looks like a gain.
_LEAST_GAIN = 1e-9


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
    for position in range(board.counts[rank]):
        row = board.rows[rank, position]
        size += board.num_items[row]
    out = np.empty(size, dtype=np.int64)
    k = 0
    for position in range(board.counts[rank]):
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
    for position in range(board.counts[rank]):
        row = board.rows[rank, position]
        if board.num_items[row] > 0 and (best < 0 or board.tokens[row] < board.tokens[best]):
            best = row
    return best


@kernel
def _forward_seconds(board: Board, rank: int) -> float:
    """Seconds of one chunk's forwards of all micro-batches of a rank."""
    seconds = 0.0
    for position in range(board.counts[rank]):
        seconds += board.row_seconds[board.rows[rank, position]]
    return seconds
