"""Items into a grid of rows of several widths, and moves that make its simulated step faster.

`fill_grid` lets items choose their rows one by one, the largest first. Each slot has a target: the
seconds that a row there should take. An item goes over as few ranks as its slot's target allows.

`improve_grid` takes a random operation on the critical path, the chain of operations that the
step's end waits for. It moves or exchanges items of its row, exchanges blocks of slots, or takes
all items out of a few blocks and lets them choose again. The result is simulated with all ranks
together, because ranks that share a row wait for each other. A slightly slower step is accepted,
less and less, and the fastest one is kept.
"""

from __future__ import annotations

import numpy as np

from megapack.base.arrays import Floats, Ints
from megapack.base.jit import kernel
from megapack.pipeline.kernels import RankOps
from megapack.planner.bins import sift_down
from megapack.planner.grid import (
    Grid,
    GridCost,
    GridItems,
    copy_grid,
    grid_seconds,
    is_open,
    is_room,
    level_tokens,
    put,
    seconds_with,
    swap_blocks,
    take,
)
from megapack.planner.refine import next_random

# All constants of this module were chosen by hand. docs/planner.md measures the whole search.

# Choice of a row: a second over the stretched target counts as this many seconds of room left.
_OVER = 4.0
# Choice of a row: twice the ranks count as this part of a mean target, so that an item is cut
# further only if a narrower row would be over its target.
_WIDER = 0.5
# Items of less than this part of a mean target go to the row with the most room left, from a heap:
# looking at all rows for each of 2,048 items takes ten times as long.
_SMALL = 0.25
# Rows at the top of the heap that are tried before all rows are: 1 + 2 + 4 + 8.
_TOP_NODES = 15

# Start of the pseudo-random sequence, as in `refine`.
_SEED = 88172645463325252
# Random numbers between 0 and 1 are multiples of 1/4096.
_PARTS = 4096
# Of 8 kinds of moves, 0 and 1 exchange blocks, 2 to 4 exchange items, and the others let the items
# of some blocks choose again.
_KINDS = 8
_LAST_SWAP = 1
_LAST_EXCHANGE = 4
# Pairs of rows that are drawn for an exchange of items until one is legal.
_DRAWS = 8
# Items choose again from 1 to 3 blocks of at most 2**3 ranks, and no block is added after 64 items.
_MAX_RUINED = 3
_MAX_RUINED_LEVELS = 4
_MAX_TAKEN = 64
# Items choose again with a stretch from 0.9 to 1.5 and up to 0.3 mean targets of noise.
_LEAST_STRETCH = 0.9
_STRETCH_RANGE = 0.6
_NOISE = 0.3
# A step that is 0.3 % slower is accepted at first, and none at the end.
_WARMTH = 0.003
# The mean of the ranks' seconds counts as this part of the step's: a move that makes only a faster
# rank faster is kept, and helps later.
_TIE = 0.02


@kernel
def fill_grid(
    cost: GridCost,
    items: GridItems,
    grid: Grid,
    order: Ints,
    least: Ints,
    targets: Floats,
    stretch: float,
    random: Ints,
    noise: float,
) -> bool:
    """Put items into the grid; returns whether all of them found a row.

    Args:
        order: items, in the order in which they choose.
        least: int64 [I], the least level of a row that holds the item.
        targets: float64 [M], seconds that the rows of each slot should take.
        stretch: a row may take this many times its target before its item goes over more ranks.
        noise: the choice is changed at random by up to this part of a mean target.
    """
    mean = _mean_target(targets)
    last = order.size
    small = _SMALL * mean
    if noise == 0:
        # Heavy items come first within a least level, and the last of them need only one rank.
        while last > 0 and _is_small(cost, items, order[last - 1], least, small):
            last -= 1
    for item in order[:last]:
        cell, k = _best_place(
            cost, items, grid, item, least[item], targets, mean, stretch, random, noise
        )
        if cell < 0:
            return False
        put(cost, items, grid, item, cell, k)
    return _fill_small(cost, items, grid, order[last:], targets)


@kernel
def _mean_target(targets: Floats) -> float:
    """The mean of the targets; 1 if all are 0, as with a cost model without coefficients."""
    mean = targets.mean()
    return float(mean) if mean > 0 else 1.0


@kernel
def _is_small(cost: GridCost, items: GridItems, item: int, least: Ints, small: float) -> bool:
    """Whether an item needs one rank only, and less than `small` seconds."""
    seconds = cost.per_token[0] * items.tokens[0, item]
    seconds += cost.per_token_sq[0] * items.tokens_sq[0, item]
    return bool(least[item] == 0 and seconds + cost.per_sample[0] * items.samples[item] < small)


@kernel
def _fill_small(cost: GridCost, items: GridItems, grid: Grid, order: Ints, targets: Floats) -> bool:
    """Put each item into the row with the most room up to its target; whether all found one."""
    dp, count = grid.first.shape
    if order.size == 0:
        return True
    missing = np.empty(dp * count)
    rows = np.empty(dp * count, dtype=np.int64)
    size = 0
    for rank in range(dp):
        for slot in range(count):
            if grid.first[rank, slot] == rank:
                cell = rank * count + slot
                missing[cell] = targets[slot] - grid.seconds[rank, slot]
                rows[size] = cell
                size += 1
    rows = rows[:size]
    heap = rows[np.argsort(-missing[rows], kind="mergesort")]
    node_of = np.empty(dp * count, dtype=np.int64)
    for node in range(size):
        node_of[heap[node]] = node
    for item in order:
        best = _roomiest(cost, items, grid, item, heap[:_TOP_NODES], missing)
        if best < 0:
            best = _roomiest(cost, items, grid, item, rows, missing)
        if best < 0:
            return False
        put(cost, items, grid, item, best, grid.level[best])
        missing[best] = targets[best % count] - grid.seconds[best // count, best % count]
        sift_down(heap, node_of, missing, node_of[best])
    return True


@kernel
def _roomiest(
    cost: GridCost, items: GridItems, grid: Grid, item: int, rows: Ints, missing: Floats
) -> int:
    """The row with the most missing seconds among those within whose capacity an item may join; -1
    if there is none."""
    best = -1
    for cell in rows:
        is_better = best < 0 or missing[cell] > missing[best]
        if is_better and is_room(cost, items, grid, cell, grid.level[cell], item):
            best = cell
    return best


@kernel
def close_gaps(cost: GridCost, items: GridItems, grid: Grid, least: Ints) -> bool:
    """Fill all empty cells; returns whether none is left.

    An empty cell gets an item of the slowest row of several items. If no row has several, the rows
    beside the cell become one row, over the cell too.
    """
    dp, count = grid.first.shape
    for cell in range(dp * count):
        rank = cell // count
        slot = cell % count
        if grid.first[rank, slot] != rank or grid.num_items[cell] > 0:
            continue
        slowest = -1
        for row in range(dp * count):
            if grid.num_items[row] < 2 or least[grid.head[row]] > 0:
                continue
            seconds = grid.seconds[row // count, row % count]
            if slowest < 0 or seconds > grid.seconds[slowest // count, slowest % count]:
                slowest = row
        if slowest >= 0:
            item = grid.head[slowest]
            take(cost, items, grid, item)
            put(cost, items, grid, item, cell, 0)
        elif not _widen_into(cost, items, grid, rank, slot):
            return False
    return True


@kernel
def _widen_into(cost: GridCost, items: GridItems, grid: Grid, rank: int, slot: int) -> bool:
    """Make one row of the smallest block around an empty cell that has items; whether it fits."""
    dp, count = grid.first.shape
    for k in range(1, cost.unit.size):
        width = 1 << k
        low = rank - rank % width
        if low + width > dp:
            return False
        taken = np.empty(grid.row_of.size, dtype=np.int64)
        size = 0
        tokens = 0
        # No row reaches out of the block: a part of the block is empty.
        for r in range(low, low + width):
            cell = r * count + slot
            while grid.num_items[cell] > 0:
                taken[size] = grid.head[cell]
                tokens += items.tokens[k, taken[size]]
                take(cost, items, grid, taken[size])
                size += 1
        for item in taken[:size]:
            put(cost, items, grid, item, low * count + slot, k)
        if size > 0:
            return bool(level_tokens(cost, k, tokens) <= cost.capacity[k])
    return False


@kernel
def _best_place(
    cost: GridCost,
    items: GridItems,
    grid: Grid,
    item: int,
    least: int,
    targets: Floats,
    mean: float,
    stretch: float,
    random: Ints,
    noise: float,
) -> tuple[int, int]:
    """The cell and level of the row that suits an item best; -1, 0 if no row has room."""
    dp, count = grid.first.shape
    best = np.inf
    best_cell = -1
    best_level = 0
    for k in range(least, cost.unit.size):
        width = 1 << k
        for slot in range(count):
            goal = targets[slot]
            for rank in range(0, dp - width + 1, width):
                if not is_open(grid, rank, slot, k):
                    continue
                cell = rank * count + slot
                if not is_room(cost, items, grid, cell, k, item):
                    continue
                seconds = seconds_with(cost, items, grid, cell, k, item)
                # Less is better: room that is left, then time over the target, then new width.
                value = (seconds - goal) / mean
                if seconds > goal * stretch:
                    value += _OVER * (seconds - goal * stretch) / mean
                if k > 0 and grid.num_items[cell] == 0:
                    value += _WIDER * k
                if noise > 0:
                    value += noise * next_random(random, _PARTS) / _PARTS
                if value < best:
                    best = value
                    best_cell = cell
                    best_level = k
    return best_cell, best_level


@kernel
def improve_grid(
    cost: GridCost,
    items: GridItems,
    grid: Grid,
    ops: RankOps,
    order: Ints,
    least: Ints,
    targets: Floats,
    budget: int,
    goal: float,
) -> float:
    """Change a grid by random moves and leave the fastest one found; returns its seconds.

    Args:
        order, least, targets: see `fill_grid`.
        budget: simulations to spend.
        goal: seconds that are fast enough.
    """
    dp = grid.first.shape[0]
    random = np.array([_SEED & 0xFFFFFFFFFFFF])
    rank_of_item = np.empty(order.size, dtype=np.int64)
    for k in range(order.size):
        rank_of_item[order[k]] = k
    end = np.empty((dp, ops.stage.size))
    before, last = _neighbours(ops)
    kept = _clone(grid)
    best_grid = _clone(grid)
    best = grid_seconds(cost, grid, ops, end)
    current = best + _tie(cost, end, last, dp)
    path = np.empty((ops.stage.size, 2), dtype=np.int64)
    length = _critical_path(cost, grid, ops, end, before, last, path)
    mean = _mean_target(targets)
    for used in range(budget):
        if best <= goal:
            break
        at = next_random(random, length)
        rank = path[at, 0]
        slot = path[at, 1]
        kind = next_random(random, _KINDS)
        if kind <= _LAST_SWAP:
            done = _try_swap(grid, random, rank, slot)
        elif kind <= _LAST_EXCHANGE:
            done = _try_exchange(cost, items, grid, random, rank, slot)
        else:
            done = _try_ruin(
                cost, items, grid, random, rank, slot, rank_of_item, least, targets, mean
            )
        if not done:
            copy_grid(kept, grid)
            continue
        seconds = grid_seconds(cost, grid, ops, end)
        value = seconds + _tie(cost, end, last, dp)
        warmth = _WARMTH * (budget - used) / budget
        if value < current * (1 + warmth):
            current = value
            copy_grid(grid, kept)
            length = _critical_path(cost, grid, ops, end, before, last, path)
            if seconds < best:
                best = seconds
                copy_grid(grid, best_grid)
        else:
            copy_grid(kept, grid)
    copy_grid(best_grid, grid)
    return float(best)


@kernel
def _clone(grid: Grid) -> Grid:
    return Grid(
        grid.row_of.copy(),
        grid.next.copy(),
        grid.head.copy(),
        grid.tokens.copy(),
        grid.tokens_sq.copy(),
        grid.num_samples.copy(),
        grid.num_items.copy(),
        grid.level.copy(),
        grid.first.copy(),
        grid.seconds.copy(),
    )


@kernel
def _neighbours(ops: RankOps) -> tuple[Ints, Ints]:
    """The operation before each one on its stage (-1: none), and the last one of each stage."""
    before = np.empty(ops.stage.size, dtype=np.int64)
    last = np.full(ops.pp, -1, dtype=np.int64)
    for op in range(ops.stage.size):
        before[op] = last[ops.stage[op]]
        last[ops.stage[op]] = op
    return before, last


@kernel
def _tie(cost: GridCost, end: Floats, last: Ints, dp: int) -> float:
    """A small part of the mean of the ranks' seconds, so that moves on faster ranks count, too."""
    ranks = 1 if cost.lockstep else dp
    total = 0.0
    for rank in range(ranks):
        latest = 0.0
        for op in last:
            latest = max(latest, end[rank, op])
        total += latest
    return _TIE * total / ranks


@kernel
def _critical_path(
    cost: GridCost, grid: Grid, ops: RankOps, end: Floats, before: Ints, last: Ints, path: Ints
) -> int:
    """Rank and slot of the operations that the step's end waits for, written to `path`.

    Returns:
        Their number.
    """
    dp, count = grid.first.shape
    ranks = 1 if cost.lockstep else dp
    rank = 0
    op = last[0]
    for r in range(ranks):
        for o in last:
            if end[r, o] > end[rank, op]:
                rank = r
                op = o
    size = ops.stage.size
    length = 0
    while op >= 0:
        slot = ops.microbatch[op]
        owner = rank
        if cost.lockstep:
            for r in range(dp):
                if grid.seconds[r, slot] > grid.seconds[owner, slot]:
                    owner = r
        path[length, 0] = owner
        path[length, 1] = slot
        length += 1
        low = rank
        high = rank + 1
        if not cost.lockstep:
            low = grid.first[rank, slot]
            high = low + (1 << grid.level[low * count + slot])
        source = ops.waits_for[op]
        latest = -1.0
        following = -1
        for r in range(low, high):
            if before[op] >= 0 and end[r, before[op]] > latest:
                latest = end[r, before[op]]
                following = before[op]
                rank = r
            if source < size and end[r, source] + ops.p2p > latest:
                latest = end[r, source] + ops.p2p
                following = source
                rank = r
        op = following
    return length


@kernel
def _try_swap(grid: Grid, random: Ints, rank: int, slot: int) -> bool:
    """Exchange a block of a slot with a block of another one, or two whole slots."""
    dp, count = grid.first.shape
    other_slot = next_random(random, count)
    kind = next_random(random, 3)
    if kind == 0:
        if other_slot == slot:
            return False
        swap_blocks(grid, 0, slot, 0, other_slot, dp)
        return True
    k = grid.level[grid.first[rank, slot] * count + slot]
    width = 1 << k
    if next_random(random, 3) == 0 and 2 * width <= dp:
        k += 1
        width *= 2
    rank -= rank % width
    if rank + width > dp:
        return False
    other = rank if kind == 1 else next_random(random, dp // width) * width
    if other == rank and other_slot == slot:
        return False
    for r in range(0, width):
        if not _within(grid, rank, slot, width, r) or not _within(
            grid, other, other_slot, width, r
        ):
            return False
    swap_blocks(grid, rank, slot, other, other_slot, width)
    return True


@kernel
def _within(grid: Grid, rank: int, slot: int, width: int, r: int) -> bool:
    """Whether the row at a cell of a block lies wholly inside the block."""
    count = grid.first.shape[1]
    first = grid.first[rank + r, slot]
    return first >= rank and first + (1 << grid.level[first * count + slot]) <= rank + width


@kernel
def _try_exchange(
    cost: GridCost, items: GridItems, grid: Grid, random: Ints, rank: int, slot: int
) -> bool:
    """Move an item of a row to another row, or exchange two items."""
    dp, count = grid.first.shape
    cell = grid.first[rank, slot] * count + slot
    if grid.num_items[cell] == 0:
        return False
    for _ in range(_DRAWS):
        other_slot = next_random(random, count)
        other_rank = grid.first[next_random(random, dp), other_slot]
        other = other_rank * count + other_slot
        if other == cell:
            continue
        a = _pick(grid, random, cell)
        b = -1
        if grid.num_items[other] > 0 and next_random(random, 3) > 0:
            b = _pick(grid, random, other)
        k = grid.level[cell]
        j = grid.level[other]
        if b < 0 and grid.num_items[cell] == 1 and k > 0:
            continue
        if b >= 0 and (grid.num_items[cell] == 1 and grid.num_items[other] == 1 and j == k):
            continue
        if not _fits_after(cost, items, grid, cell, k, a, b):
            continue
        if not _fits_after(cost, items, grid, other, j, b, a):
            continue
        _replace(cost, items, grid, cell, k, other, j, a, b)
        return True
    return False


@kernel
def _replace(
    cost: GridCost,
    items: GridItems,
    grid: Grid,
    cell: int,
    k: int,
    other: int,
    j: int,
    a: int,
    b: int,
) -> None:
    take(cost, items, grid, a)
    if b >= 0:
        take(cost, items, grid, b)
    put(cost, items, grid, a, other, j)
    if b >= 0:
        put(cost, items, grid, b, cell, k)


@kernel
def _fits_after(
    cost: GridCost, items: GridItems, grid: Grid, cell: int, k: int, leaving: int, coming: int
) -> bool:
    """Whether a row is within its capacity after one item leaves and another comes; -1: none."""
    tokens = grid.tokens[cell]
    if leaving >= 0:
        tokens -= items.tokens[k, leaving]
    if coming >= 0:
        tokens += items.tokens[k, coming]
    unit = cost.unit[k]
    return bool(-(-tokens // unit) * unit <= cost.capacity[k])


@kernel
def _pick(grid: Grid, random: Ints, cell: int) -> int:
    item = grid.head[cell]
    for _ in range(next_random(random, grid.num_items[cell])):
        item = grid.next[item]
    return int(item)


@kernel
def _try_ruin(
    cost: GridCost,
    items: GridItems,
    grid: Grid,
    random: Ints,
    rank: int,
    slot: int,
    place: Ints,
    least: Ints,
    targets: Floats,
    mean: float,
) -> bool:
    """Take all items out of a few blocks, and let them choose their rows again."""
    dp, count = grid.first.shape
    taken = np.empty(grid.row_of.size, dtype=np.int64)
    size = 0
    for _ in range(1 + next_random(random, _MAX_RUINED)):
        width = 1 << next_random(random, min(cost.unit.size, _MAX_RUINED_LEVELS))
        low = rank - rank % width
        for r in range(low, min(low + width, dp)):
            cell = grid.first[r, slot] * count + slot
            while grid.num_items[cell] > 0:
                item = grid.head[cell]
                take(cost, items, grid, item)
                taken[size] = item
                size += 1
        if size >= _MAX_TAKEN:
            break
        rank = next_random(random, dp)
        slot = next_random(random, count)
    if size == 0:
        return False
    chosen = taken[:size]
    chosen = chosen[np.argsort(place[chosen])]
    stretch = _LEAST_STRETCH + _STRETCH_RANGE * next_random(random, _PARTS) / _PARTS
    noise = _NOISE * next_random(random, _PARTS) / _PARTS
    return bool(fill_grid(cost, items, grid, chosen, least, targets, stretch, random, noise))
