"""Items choose their rows in a grid, one by one.

Each slot has a target: the seconds that a row there should take. An item goes over as few ranks as
a slot's target allows, and into the row that then has the most room left.
"""

from __future__ import annotations

import numpy as np

from megapack.base.arrays import Floats, Ints
from megapack.base.jit import kernel
from megapack.planner.bins import sift_down
from megapack.planner.grid import (
    Grid,
    GridCost,
    GridItems,
    is_open,
    is_room,
    level_tokens,
    put,
    seconds_with,
    take,
)
from megapack.planner.moves import next_random

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
# Random numbers between 0 and 1 are multiples of 1/4096.
RANDOM_PARTS = 4096


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
    mean = mean_target(targets)
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
def mean_target(targets: Floats) -> float:
    """The mean of the targets; 1 if all are 0, as with a cost model without coefficients."""
    # Added one by one: numpy and numba add arrays in different orders.
    total = 0.0
    for target in targets:
        total += target
    mean = total / targets.size
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
                    value += noise * next_random(random, RANDOM_PARTS) / RANDOM_PARTS
                if value < best:
                    best = value
                    best_cell = cell
                    best_level = k
    return best_cell, best_level
