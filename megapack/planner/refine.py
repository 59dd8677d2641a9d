"""Local search on a draft, scored by the simulator.

With a pipeline: the slowest rank sets the step's time. A move puts an item of one of its rows into
another row, exchanges two items, or exchanges two rows in its order. The move is kept if the ranks
that it changes are then faster than the slowest rank was. Moves come from a fixed pseudo-random
sequence and the budget counts simulations, so that equal inputs give equal plans.

Without a pipeline: a rank's seconds are the sum of its rows' seconds, in any order. The best
exchange of items between the slowest rank and another one is found by bisection, because
pseudo-random moves stop improving much earlier.
"""

from __future__ import annotations

import numpy as np

from megapack.base.arrays import Floats, Ints
from megapack.base.jit import kernel
from megapack.base.loops import copy_into
from megapack.pipeline.kernels import RankOps
from megapack.planner.state import (
    RowCost,
    State,
    exchange,
    fits,
    microbatch_seconds,
    ops_of,
    row_seconds,
    score_rank,
    slowest,
)

# All constants of this module were chosen by hand. docs/planner.md measures the whole search.

# With a pipeline: start of the pseudo-random sequence, the usual seed of Marsaglia's xorshift64.
_SEED = 88172645463325252
# With a pipeline: of 8 kinds of moves, 0 to 2 change the order of the slowest rank, 3 to 5 exchange
# items between its rows, 6 exchanges items with a random rank, and 7 with the fastest one.
_KINDS = 8
_LAST_ORDER = 2
_LAST_OWN_ROWS = 5
_RANDOM_RANK = 6
# With a pipeline: exchanges with another rank that are drawn per move. The one nearest to the
# wanted shift is simulated: 0.1 s if the slowest rank takes 1.2 s and the other one 1.0 s. 64 draws
# take a fifth longer to plan 2,048 samples and give plans that are no better, by less than 0.1 %.
_DRAWS = 12
# With a pipeline: moves without a legal draw cost no simulation. The search ends after 4 of them
# per simulation of the budget, and 64 more: after 8,256 with a budget of 2,048.
_MISSES_PER_SIMULATION = 4
_FREE_MISSES = 64

# Without a pipeline: items of the other rank that are tried on either side of the best one, in case
# that one has no room.
_NEIGHBOURS = 4
# Without a pipeline: stop if the slowest rank is this near to the fastest, 1 us in a step of 1 s.
_EVEN = 1e-6
# Without a pipeline: an exchange must shrink the gap by more than this, so that rounding in fp64
# (1e-16 per operation) never looks like a gain.
_LEAST_GAIN = 1e-9


def refine(
    cost: RowCost,
    state: State,
    all_ops: RankOps,
    bounds: Ints,
    lockstep: bool,
    budget: int,
    passes: float,
) -> int:
    """Improve a draft in place by moves. Its `state.seconds` must have been simulated.

    Args:
        all_ops: operations of all ranks.
        bounds: int64 [dp, 2], rank r's operations are those from bounds[r, 0] to bounds[r, 1].
        lockstep: ranks synchronize in every micro-batch.
        budget: simulations to spend.
        passes: a rank's seconds over its micro-batches' forward seconds, without the bubble.

    Returns:
        Simulations spent.
    """
    if all_ops.pp == 1 and not lockstep and not cost.fixed_rows:
        return _even_ranks(cost, state, budget, passes)
    return _try_moves(cost, state, all_ops, bounds, lockstep, budget, passes)


@kernel
def _try_moves(
    cost: RowCost,
    state: State,
    all_ops: RankOps,
    bounds: Ints,
    lockstep: bool,
    budget: int,
    passes: float,
) -> int:
    """Make pseudo-random moves that make the slowest rank faster; returns simulations spent."""
    random = np.array([_SEED & 0xFFFFFFFFFFFF])
    no_chain = np.full(state.row_of.size, -1, dtype=np.int64)
    most_misses = _MISSES_PER_SIMULATION * budget + _FREE_MISSES
    used = 0
    misses = 0
    while used < budget and misses < most_misses:
        slow = slowest(state)
        if lockstep:
            slow = next_random(random, state.counts.size)
        kind = next_random(random, _KINDS)
        if cost.fixed_rows:
            kind = 0
        spent = 0
        if kind <= _LAST_ORDER:
            spent = _try_order(cost, state, all_ops, bounds, lockstep, random, slow)
        else:
            other = slow
            if kind > _LAST_OWN_ROWS:
                other = fastest(state)
                if kind == _RANDOM_RANK or lockstep or other == slow:
                    other = next_random(random, state.counts.size)
            spent = _try_exchange(
                cost, state, no_chain, all_ops, bounds, lockstep, random, slow, other, passes
            )
        used += spent
        misses += 1 if spent == 0 else 0
    return used


@kernel
def fastest(state: State) -> int:
    """The rank with the fewest simulated seconds; the first one if ranks are equal."""
    best = 0
    for rank in range(state.seconds.size):
        if state.seconds[rank] < state.seconds[best]:
            best = rank
    return best


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
    """Exchange two rows in a rank's order, or move one row; kept if the rank is faster.

    Returns:
        Simulations spent: 0 or 1.
    """
    count = state.counts[rank]
    p = next_random(random, count)
    q = next_random(random, count)
    if p == q:
        return 0
    rotate = next_random(random, 2) == 0
    before = state.rows[rank, :count].copy()
    state.rows[rank, p] = before[q]
    if rotate:
        step = 1 if p < q else -1
        for position in range(p, q, step):
            state.rows[rank, position] = before[position + step]
    state.rows[rank, q] = before[p]
    seconds = score_rank(cost, state, ops_of(all_ops, bounds, rank), rank, lockstep)
    if seconds < state.seconds[rank]:
        _set_seconds(state, rank, seconds, lockstep)
    else:
        copy_into(state.rows[rank], before)
    return 1


@kernel
def _try_exchange(
    cost: RowCost,
    state: State,
    no_chain: Ints,
    all_ops: RankOps,
    bounds: Ints,
    lockstep: bool,
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
    wanted = (state.seconds[slow] - state.seconds[other]) / (2 * passes)
    a, b, row_a, row_b = draw_exchange(cost, state, no_chain, random, slow, other, wanted)
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
    """Write a rank's seconds; in lockstep they are those of all ranks."""
    if lockstep:
        state.seconds[:] = seconds
    else:
        state.seconds[rank] = seconds


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
def _pick(state: State, random: Ints, row: int) -> int:
    """A random item of a row."""
    item = state.head[row]
    for _ in range(next_random(random, state.num_items[row])):
        item = state.next[item]
    return int(item)


@kernel
def _relief(cost: RowCost, state: State, row: int, leaving: int, coming: int) -> float:
    """Forward seconds that a row saves if one item leaves and another one comes (-1: no item)."""
    tokens = state.tokens[row] - state.item_tokens[leaving]
    tokens_sq = state.tokens_sq[row] - state.item_tokens_sq[leaving]
    num_samples = state.num_samples[row] - state.item_samples[leaving]
    if coming >= 0:
        tokens += state.item_tokens[coming]
        tokens_sq += state.item_tokens_sq[coming]
        num_samples += state.item_samples[coming]
    before = row_seconds(cost, state.tokens[row], state.tokens_sq[row], state.num_samples[row])
    return before - row_seconds(cost, tokens, tokens_sq, num_samples)


@kernel
def draw_exchange(
    cost: RowCost,
    state: State,
    chain: Ints,
    random: Ints,
    slow: int,
    other: int,
    wanted: float,
) -> tuple[int, int, int, int]:
    """Draw an exchange between two ranks that saves the slow one about `wanted` seconds.

    Args:
        chain: int64 [I], -1 for the items that may be exchanged, see `items.Pieces.chain`.

    Returns:
        Items a and b, the row of a and the row of b. b is -1 if a moves and no item comes back; a
        is -1 if no draw was legal.
    """
    best = (-1, -1, -1, -1)
    nearest = np.inf
    for _ in range(_DRAWS):
        row_a = state.rows[slow, next_random(random, state.counts[slow])]
        row_b = state.rows[other, next_random(random, state.counts[other])]
        if row_a < 0 or row_b < 0 or row_a == row_b:
            continue
        a = _pick(state, random, row_a)
        b = -1
        # One draw in three moves an item without an exchange.
        if next_random(random, 3) > 0:
            b = _pick(state, random, row_b)
        if chain[a] >= 0 or (b >= 0 and chain[b] >= 0):
            continue
        if not (fits(cost, state, row_a, a, b) and fits(cost, state, row_b, b, a)):
            continue
        miss = abs(_relief(cost, state, row_a, a, b) - wanted)
        if miss < nearest:
            nearest = miss
            best = (a, b, row_a, row_b)
        if slow == other:
            break  # Within a rank no shift of seconds is wanted, so any exchange will do.
    return best


@kernel
def _even_ranks(cost: RowCost, state: State, budget: int, passes: float) -> int:
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
        rising = np.argsort(state.seconds, kind="mergesort")
        slow = rising[-1]
        if state.seconds[slow] - state.seconds[rising[0]] < _EVEN * state.seconds[slow]:
            break
        # The slowest rank first. If it finds no exchange, exchanges between other ranks may leave
        # these with items that help it.
        for i in range(rising.size - 1, 0, -1):
            for j in range(i):
                if not improved and used < budget:
                    used += 1
                    improved = _narrow(cost, state, rising[i], rising[j], passes)
    return used


@kernel
def _narrow(cost: RowCost, state: State, slow: int, other: int, passes: float) -> bool:
    """Make the best exchange between two ranks; returns whether the slow one is then faster."""
    gap = (state.seconds[slow] - state.seconds[other]) / passes
    a, b, row_b = _best_exchange(cost, state, slow, other, gap)
    if a < 0:
        return False
    row_a = state.row_of[a]
    exchange(state, a, b, row_a, row_b)
    seconds = passes * _forward_seconds(cost, state, slow)
    other_seconds = passes * _forward_seconds(cost, state, other)
    # Row lengths are rounded up to the alignment, so that an exchange may gain nothing.
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
    """The exchange that comes nearest to halving the gap between two ranks.

    With a gap of 10, the best partner of an item of 7 is an item of 2: the exchange shifts 5.

    Returns:
        Items a and b, and the row of the other rank. b is -1 if a moves and no item comes back; a
        is -1 if no exchange makes the gap smaller.
    """
    items_a = _items(state, slow)
    items_b = _items(state, other)
    seconds_a = _seconds(cost, state, items_a)
    seconds_b = _seconds(cost, state, items_b)
    rising = np.argsort(seconds_b, kind="mergesort")
    seconds_b = seconds_b[rising]
    items_b = items_b[rising]
    roomiest = _roomiest(state, other)
    nearest = gap / 2 * (1 - _LEAST_GAIN)
    best = (-1, -1, -1)
    for k in range(items_a.size):
        a = items_a[k]
        row_a = state.row_of[a]
        wanted = seconds_a[k] - gap / 2
        alone = roomiest >= 0 and fits(cost, state, row_a, a, -1)
        if alone and abs(wanted) < nearest and fits(cost, state, roomiest, -1, a):
            nearest = abs(wanted)
            best = (a, -1, roomiest)
        middle = np.searchsorted(seconds_b, wanted)
        for j in range(max(middle - _NEIGHBOURS, 0), min(middle + _NEIGHBOURS, seconds_b.size)):
            if abs(seconds_b[j] - wanted) < nearest:
                b = items_b[j]
                row_b = state.row_of[b]
                if fits(cost, state, row_a, a, b) and fits(cost, state, row_b, b, a):
                    nearest = abs(seconds_b[j] - wanted)
                    best = (a, b, row_b)
    return best


@kernel
def _items(state: State, rank: int) -> Ints:
    """Items of a rank, row after row."""
    size = 0
    for position in range(state.counts[rank]):
        row = state.rows[rank, position]
        size += state.num_items[row] if row >= 0 else 0
    out = np.empty(size, dtype=np.int64)
    k = 0
    for position in range(state.counts[rank]):
        row = state.rows[rank, position]
        item = state.head[row] if row >= 0 else -1
        while item >= 0:
            out[k] = item
            k += 1
            item = state.next[item]
    return out


@kernel
def _seconds(cost: RowCost, state: State, items: Ints) -> Floats:
    """Seconds that each item adds to its row, without the row's alignment."""
    out = np.empty(items.size)
    for k in range(items.size):
        item = items[k]
        work = cost.per_token * state.item_tokens[item]
        work += cost.per_token_sq * state.item_tokens_sq[item]
        out[k] = work + cost.per_sample * state.item_samples[item]
    return out


@kernel
def _roomiest(state: State, rank: int) -> int:
    """The rank's row with the fewest tokens; -1 if it has only padding."""
    best = -1
    for position in range(state.counts[rank]):
        row = state.rows[rank, position]
        if row >= 0 and (best < 0 or state.tokens[row] < state.tokens[best]):
            best = row
    return best


@kernel
def _forward_seconds(cost: RowCost, state: State, rank: int) -> float:
    """Seconds of one chunk's forwards of all micro-batches of a rank."""
    seconds = 0.0
    for position in range(state.counts[rank]):
        seconds += microbatch_seconds(cost, state, rank, position)
    return seconds
