"""Even ranks where there is no pipeline: a rank's seconds are the sum of its rows', in any order.

Of all exchanges of one sample for another, or for none, between the slowest rank and another one
the best is found by bisection; drawn ones stop helping much earlier.
"""

from __future__ import annotations

import numpy as np

from megapack.inputs import Floats, Ints
from megapack.jit import kernel
from megapack.search_moves import exchange, fits
from megapack.search_scoring import RowCost, State, place_seconds

# Partners that are tried on either side of the best one, for rows without room.
_NEIGHBOURS = 4
# Ranks this near to each other are left alone.
_EVEN = 1e-6


@kernel
def even_ranks(cost: RowCost, state: State, budget: int, passes: float) -> int:
    """Exchange samples between the slowest rank and others, then between these, until nothing
    helps.

    Args:
        budget: pairs of ranks that may be looked at.
        passes: a rank's seconds over its micro-batches' forward seconds.

    Returns:
        Pairs of ranks looked at.
    """
    used = 0
    improved = True
    while improved and used < budget:
        improved = False
        rising = np.argsort(state.seconds)
        slow = rising[-1]
        if state.seconds[slow] - state.seconds[rising[0]] < _EVEN * state.seconds[slow]:
            break
        # The slowest rank first; where it is stuck, others may end up with samples of use to it.
        for i in range(rising.size - 1, 0, -1):
            for j in range(i):
                if not improved and used < budget:
                    used += 1
                    improved = _narrow(cost, state, rising[i], rising[j], passes)
    return used


@kernel
def _narrow(cost: RowCost, state: State, slow: int, other: int, passes: float) -> bool:
    """Make the best exchange between two ranks; whether the slower one is then faster."""
    gap = (state.seconds[slow] - state.seconds[other]) / passes
    a, b, row_b = _best_exchange(cost, state, slow, other, gap)
    if a < 0:
        return False
    row_a = state.row_of[a]
    exchange(state, a, b, row_a, row_b)
    seconds = passes * _forward_seconds(cost, state, slow)
    other_seconds = passes * _forward_seconds(cost, state, other)
    # Rows in units of the alignment may gain nothing.
    if max(seconds, other_seconds) >= state.seconds[slow]:
        exchange(state, a, b, row_b, row_a)
        return False
    state.seconds[slow] = seconds
    state.seconds[other] = other_seconds
    return True


@kernel
def _best_exchange(
    cost: RowCost, state: State, slow: int, other: int, gap: float
) -> tuple[int, int, int]:
    """Items a and b that halve the gap best, and b's row; a = -1 where none makes it smaller,
    b = -1 where a goes without return."""
    givers = _items(state, slow)
    takers = _items(state, other)
    given = _seconds(cost, state, givers)
    taken = _seconds(cost, state, takers)
    rising = np.argsort(taken)
    taken = taken[rising]
    takers = takers[rising]
    roomiest = _roomiest(state, other)
    # Relative, so that rounding never looks like a gain.
    nearest = gap / 2 * (1 - 1e-9)
    best = (-1, -1, -1)
    for k in range(givers.size):
        a = givers[k]
        row_a = state.row_of[a]
        wanted = given[k] - gap / 2
        alone = roomiest >= 0 and fits(cost, state, row_a, a, -1)
        if alone and abs(wanted) < nearest and fits(cost, state, roomiest, -1, a):
            nearest = abs(wanted)
            best = (a, -1, roomiest)
        middle = np.searchsorted(taken, wanted)
        for j in range(max(middle - _NEIGHBOURS, 0), min(middle + _NEIGHBOURS, taken.size)):
            if abs(taken[j] - wanted) < nearest:
                b = takers[j]
                row_b = state.row_of[b]
                if fits(cost, state, row_a, a, b) and fits(cost, state, row_b, b, a):
                    nearest = abs(taken[j] - wanted)
                    best = (a, b, row_b)
    return best


@kernel
def _items(state: State, rank: int) -> Ints:
    """Items of a rank, row after row."""
    size = 0
    for place in range(state.counts[rank]):
        row = state.rows[rank, place]
        size += state.num[row] if row >= 0 else 0
    out = np.empty(size, dtype=np.int64)
    k = 0
    for place in range(state.counts[rank]):
        row = state.rows[rank, place]
        item = state.head[row] if row >= 0 else -1
        while item >= 0:
            out[k] = item
            k += 1
            item = state.next[item]
    return out


@kernel
def _seconds(cost: RowCost, state: State, items: Ints) -> Floats:
    """What each item adds to its row; the row's own alignment is left out."""
    out = np.empty(items.size)
    for k in range(items.size):
        item = items[k]
        work = cost.per_token * state.item_tokens[item]
        work += cost.per_token_sq * state.item_tokens_sq[item]
        out[k] = work + cost.per_sample * state.item_samples[item]
    return out


@kernel
def _roomiest(state: State, rank: int) -> int:
    """The rank's row of fewest tokens; -1 where it has padding only."""
    best = -1
    for place in range(state.counts[rank]):
        row = state.rows[rank, place]
        if row >= 0 and (best < 0 or state.tokens[row] < state.tokens[best]):
            best = row
    return best


@kernel
def _forward_seconds(cost: RowCost, state: State, rank: int) -> float:
    seconds = 0.0
    for place in range(state.counts[rank]):
        seconds += place_seconds(cost, state, rank, place)
    return seconds
