"""Moves that make the simulated step of a grid faster.

A move takes a random operation on the critical path, the chain of operations that the step's end
waits for. It moves or exchanges items of its row, exchanges blocks of slots, or takes all items out
of a few blocks and lets them choose again. The result is simulated with all ranks together, because
ranks that share a row wait for each other. A slightly slower step is accepted, less and less, and
the fastest one is kept.
"""

from __future__ import annotations

import numpy as np

from megapack.base.arrays import Floats, Ints
from megapack.base.jit import kernel
from megapack.pipeline.kernels import RankOps
from megapack.planner.grid import (
    Grid,
    GridCost,
    GridItems,
    copy_grid,
    grid_seconds,
    put,
    swap_blocks,
    take,
)
from megapack.planner.grid_fill import RANDOM_PARTS, fill_grid, mean_target
from megapack.planner.moves import SEED, next_random

# All constants of this module were chosen by hand. docs/planner.md measures the whole search.

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
    random = np.array([SEED])
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
    mean = mean_target(targets)
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
    last = first + (1 << grid.level[first * count + slot])
    return bool(first >= rank and last <= rank + width)


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
    stretch = _LEAST_STRETCH + _STRETCH_RANGE * next_random(random, RANDOM_PARTS) / RANDOM_PARTS
    noise = _NOISE * next_random(random, RANDOM_PARTS) / RANDOM_PARTS
    return bool(fill_grid(cost, items, grid, chosen, least, targets, stretch, random, noise))
