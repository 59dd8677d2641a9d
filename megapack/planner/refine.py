"""Local search on a draft, scored by the simulator.

With a pipeline: the slowest rank sets the step's time. A move takes a sample from one of its rows
to another row, or exchanges two samples, or two places in its order. It stays if the ranks that it
touches are then faster than the slowest was. Moves come from a fixed pseudo-random sequence, and
their number is the budget: equal inputs give equal plans.

Without a pipeline: a rank's seconds are the sum of its rows' seconds, in any order. The best
exchange of samples between the slowest rank and another is found by bisection, because drawn moves
stop helping much earlier.
"""

from __future__ import annotations

import numpy as np

from megapack.base.arrays import Floats, Ints
from megapack.base.jit import kernel
from megapack.pipeline.kernels import RankOps
from megapack.planner.state import (
    RowCost,
    State,
    exchange,
    fits,
    ops_of,
    place_seconds,
    row_seconds,
    score_rank,
    slowest,
)

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


# Exchanges with another rank are drawn this many times; the one nearest to the wanted shift is run.
_DRAWS = 64


@kernel
def _next_random(random: Ints, limit: int) -> int:
    """The next number below `limit` of a linear congruential sequence (that of drand48).

    Scaled from its upper 32 bits: the lower ones repeat after few numbers.
    """
    random[0] = (random[0] * 25214903917 + 11) & 0xFFFFFFFFFFFF
    return int(((random[0] >> 16) * limit) >> 32)


@kernel
def _pick(state: State, random: Ints, row: int) -> int:
    """An item of a row."""
    item = state.head[row]
    for _ in range(_next_random(random, state.num[row])):
        item = state.next[item]
    return int(item)


@kernel
def _relief(cost: RowCost, state: State, row: int, leaving: int, coming: int) -> float:
    """Seconds by which a row gets shorter."""
    tokens = state.tokens[row] - state.item_tokens[leaving]
    tokens_sq = state.tokens_sq[row] - state.item_tokens_sq[leaving]
    samples = state.samples[row] - state.item_samples[leaving]
    if coming >= 0:
        tokens += state.item_tokens[coming]
        tokens_sq += state.item_tokens_sq[coming]
        samples += state.item_samples[coming]
    before = row_seconds(cost, state.tokens[row], state.tokens_sq[row], state.samples[row])
    return before - row_seconds(cost, tokens, tokens_sq, samples)


@kernel
def _draw(
    cost: RowCost, state: State, random: Ints, slow: int, other: int, wanted: float
) -> tuple[int, int, int, int]:
    """An exchange between two ranks whose relief is near `wanted`: (a, b, row of a, row of b)."""
    found = (-1, -1, -1, -1)
    nearest = np.inf
    for _ in range(_DRAWS):
        row_a = state.rows[slow, _next_random(random, state.counts[slow])]
        row_b = state.rows[other, _next_random(random, state.counts[other])]
        if row_a < 0 or row_b < 0 or row_a == row_b:
            continue
        a = _pick(state, random, row_a)
        b = -1
        if _next_random(random, 3) > 0:
            b = _pick(state, random, row_b)
        if not (fits(cost, state, row_a, a, b) and fits(cost, state, row_b, b, a)):
            continue
        miss = abs(_relief(cost, state, row_a, a, b) - wanted)
        if miss < nearest:
            nearest = miss
            found = (a, b, row_a, row_b)
        if slow == other:
            break
    return found


@kernel
def _fastest(state: State) -> int:
    best = 0
    for rank in range(state.seconds.size):
        if state.seconds[rank] < state.seconds[best]:
            best = rank
    return best


@kernel
def refine(
    cost: RowCost,
    state: State,
    all_ops: RankOps,
    bounds: Ints,
    lockstep: bool,
    budget: int,
    passes: float,
) -> int:
    """Spend `budget` simulations on moves; `state.seconds` must be scored.

    Args:
        all_ops, bounds: rank r's operations are those from bounds[r, 0] to bounds[r, 1].
        passes: a rank's seconds over its micro-batches' forward seconds, without the bubble.

    Returns:
        Simulations spent.
    """
    if all_ops.pp == 1 and not lockstep and not cost.fixed_rows:
        return even_ranks(cost, state, budget, passes)
    random = np.array([88172645463325252 & 0xFFFFFFFFFFFF])
    used = 0
    misses = 0
    while used < budget and misses < 4 * budget + 64:
        slow = slowest(state)
        if lockstep:
            slow = _next_random(random, state.counts.size)
        kind = _next_random(random, 8)
        if cost.fixed_rows:
            kind = 0
        spent = 0
        if kind < 3:
            spent = _try_order(cost, state, all_ops, bounds, lockstep, random, slow)
        else:
            other = slow
            if kind >= 6:
                other = _fastest(state)
                if kind == 6 or lockstep or other == slow:
                    other = _next_random(random, state.counts.size)
            spent = _try_exchange(
                cost, state, all_ops, bounds, lockstep, random, slow, other, passes
            )
        used += spent
        misses += 1 if spent == 0 else 0
    return used


@kernel
def _try_order(
    cost: RowCost,
    state: State,
    all_ops: RankOps,
    bounds: Ints,
    lockstep: bool,
    random: Ints,
    rank: int,
) -> int:
    """Exchange two places of a rank's order, or take one row to another place."""
    count = state.counts[rank]
    p = _next_random(random, count)
    q = _next_random(random, count)
    if p == q:
        return 0
    rotate = _next_random(random, 2) == 0
    before = state.rows[rank, :count].copy()
    state.rows[rank, p] = before[q]
    if rotate:
        step = 1 if p < q else -1
        for place in range(p, q, step):
            state.rows[rank, place] = before[place + step]
    state.rows[rank, q] = before[p]
    seconds = score_rank(cost, state, ops_of(all_ops, bounds, rank), rank, lockstep)
    if seconds < state.seconds[rank]:
        _set_seconds(state, rank, seconds, lockstep)
    else:
        state.rows[rank, :count] = before
    return 1


@kernel
def _try_exchange(
    cost: RowCost,
    state: State,
    all_ops: RankOps,
    bounds: Ints,
    lockstep: bool,
    random: Ints,
    slow: int,
    other: int,
    passes: float,
) -> int:
    wanted = (state.seconds[slow] - state.seconds[other]) / (2 * passes)
    a, b, row_a, row_b = _draw(cost, state, random, slow, other, wanted)
    if a < 0:
        return 0
    exchange(state, a, b, row_a, row_b)
    seconds = score_rank(cost, state, ops_of(all_ops, bounds, slow), slow, lockstep)
    spent = 1
    if seconds < state.seconds[slow]:
        if other == slow or lockstep:
            _set_seconds(state, slow, seconds, lockstep)
            return spent
        other_seconds = score_rank(cost, state, ops_of(all_ops, bounds, other), other, lockstep)
        spent = 2
        if other_seconds < state.seconds[slow]:
            state.seconds[slow] = seconds
            state.seconds[other] = other_seconds
            return spent
    exchange(state, a, b, row_b, row_a)
    return spent


@kernel
def _set_seconds(state: State, rank: int, seconds: float, lockstep: bool) -> None:
    if lockstep:
        state.seconds[:] = seconds
    else:
        state.seconds[rank] = seconds
