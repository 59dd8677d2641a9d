"""Rows of several widths in a grid of DP ranks by slots, as arrays for the compiled search.

A slot is the set of the k-th micro-batches of all ranks. A row of width w fills w cells of one
slot, an aligned block of ranks, and is numbered by its first cell. An empty cell is a padding
micro-batch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megapack.base.arrays import Floats, Ints
from megapack.base.jit import kernel
from megapack.pipeline.kernels import RankOps, coupled_seconds, peak_live


class GridCost(NamedTuple):
    """Seconds and limits of rows by level; a row of level k lies over 2**k DP ranks.

    seconds = fixed + per_token[k] * row tokens + per_token_sq[k] * tokens_sq
        + per_sample[k] * samples
    """

    fixed: float
    per_token: Floats
    """[levels]: of the row's tokens, those on other GPUs included."""
    per_token_sq: Floats
    per_sample: Floats
    unit: Ints
    """[levels]: row alignment in tokens."""
    capacity: Ints
    """[levels]: padded tokens that a row may hold."""
    alone: Ints
    """[levels]: padded tokens that a row of one item may hold, at least `capacity`. It is more if a
    cap on live tokens lowers `capacity`."""
    max_live: float
    """Row tokens of one DP rank whose activations a stage may hold, each chunk counted whole; 0
    without a cap."""
    lockstep: bool
    """Ranks wait for each other at every micro-batch."""
    allows_padding: bool
    """Whether cells may stay empty."""


class GridItems(NamedTuple):
    """Sizes of the I items in rows of each level."""

    tokens: Ints
    """[levels, I]: aligned tokens."""
    tokens_sq: Ints
    """[levels, I]: sum of squared aligned lengths."""
    samples: Ints
    """[I]: number of samples."""


class Grid(NamedTuple):
    """A draft with wide rows that the search changes in place: dp ranks, M slots, C = dp * M cells.

    The cell of rank r and slot m is r * M + m. Arrays over cells hold a row at its first cell.
    """

    row_of: Ints
    """[I]: the first cell of the item's row; -1 for an item that is taken out."""
    next: Ints
    """[I]: the next item of the same row; -1 at the end."""
    head: Ints
    """[C]: the row's first item; -1 in an empty cell and in the other cells of a wide row."""
    tokens: Ints
    """[C]: aligned tokens, with the alignment of the row's level."""
    tokens_sq: Ints
    """[C]: sum of squared aligned lengths."""
    num_samples: Ints
    """[C]: number of samples."""
    num_items: Ints
    """[C]: number of items."""
    level: Ints
    """[C]: the row's level; 0 in an empty cell."""
    first: Ints
    """[dp, M]: the first rank of the row; the rank itself in an empty cell."""
    seconds: Floats
    """[dp, M]: seconds of one chunk's forward."""


def empty_grid(cost: GridCost, num_items: int, dp: int, count: int) -> Grid:
    """A grid of M=`count` slots with no item in it."""
    cells = dp * count
    grid = Grid(
        row_of=np.full(num_items, -1, dtype=np.int64),
        next=np.full(num_items, -1, dtype=np.int64),
        head=np.full(cells, -1, dtype=np.int64),
        tokens=np.zeros(cells, dtype=np.int64),
        tokens_sq=np.zeros(cells, dtype=np.int64),
        num_samples=np.zeros(cells, dtype=np.int64),
        num_items=np.zeros(cells, dtype=np.int64),
        level=np.zeros(cells, dtype=np.int64),
        first=np.repeat(np.arange(dp)[:, None], count, axis=1),
        seconds=np.empty((dp, count)),
    )
    grid.seconds[:] = level_seconds(cost, 0, 0, 0, 0)
    return grid


@kernel
def copy_grid(source: Grid, target: Grid) -> None:
    """Overwrite `target` with `source`."""
    target.row_of[:] = source.row_of
    target.next[:] = source.next
    target.head[:] = source.head
    target.tokens[:] = source.tokens
    target.tokens_sq[:] = source.tokens_sq
    target.num_samples[:] = source.num_samples
    target.num_items[:] = source.num_items
    target.level[:] = source.level
    target.first[:] = source.first
    target.seconds[:] = source.seconds


@kernel
def level_tokens(cost: GridCost, level: int, tokens: int) -> int:
    """Length of a row; a padding micro-batch has one unit."""
    unit = cost.unit[level]
    return int(max(-(-tokens // unit) * unit, unit))


@kernel
def level_seconds(
    cost: GridCost, level: int, tokens: int, tokens_sq: int, num_samples: int
) -> float:
    """Seconds of one chunk's forward of a row; a padding micro-batch has 0, 0, 0."""
    work = cost.per_token[level] * level_tokens(cost, level, tokens)
    work += cost.per_token_sq[level] * tokens_sq
    return float(cost.fixed + work + cost.per_sample[level] * num_samples)


@kernel
def seconds_with(
    cost: GridCost, items: GridItems, grid: Grid, cell: int, k: int, item: int
) -> float:
    """Seconds of the row at a cell after an item has joined it; k is the level."""
    return level_seconds(
        cost,
        k,
        grid.tokens[cell] + items.tokens[k, item],
        grid.tokens_sq[cell] + items.tokens_sq[k, item],
        grid.num_samples[cell] + items.samples[item],
    )


@kernel
def write_seconds(cost: GridCost, grid: Grid, cell: int) -> None:
    """Write the seconds of a row to all of its cells."""
    count = grid.first.shape[1]
    rank = cell // count
    k = grid.level[cell]
    seconds = level_seconds(
        cost, k, grid.tokens[cell], grid.tokens_sq[cell], grid.num_samples[cell]
    )
    for r in range(rank, rank + (1 << k)):
        grid.seconds[r, cell % count] = seconds


@kernel
def put(cost: GridCost, items: GridItems, grid: Grid, item: int, cell: int, k: int) -> None:
    """Put an item into the row of level k at a cell; an empty block becomes such a row."""
    count = grid.first.shape[1]
    if grid.num_items[cell] == 0 and k > 0:
        rank = cell // count
        grid.level[cell] = k
        for r in range(rank, rank + (1 << k)):
            grid.first[r, cell % count] = rank
    grid.row_of[item] = cell
    grid.next[item] = grid.head[cell]
    grid.head[cell] = item
    grid.tokens[cell] += items.tokens[k, item]
    grid.tokens_sq[cell] += items.tokens_sq[k, item]
    grid.num_samples[cell] += items.samples[item]
    grid.num_items[cell] += 1
    write_seconds(cost, grid, cell)


@kernel
def put_all(cost: GridCost, items: GridItems, grid: Grid, cells: Ints) -> None:
    """Put each item into the row of one rank at its cell, int64 [I]."""
    for item in range(cells.size):
        put(cost, items, grid, item, cells[item], 0)


@kernel
def take(cost: GridCost, items: GridItems, grid: Grid, item: int) -> None:
    """Take an item out of its row; a row without items becomes empty cells."""
    cell = grid.row_of[item]
    k = grid.level[cell]
    at = grid.head[cell]
    if at == item:
        grid.head[cell] = grid.next[item]
    else:
        while grid.next[at] != item:
            at = grid.next[at]
        grid.next[at] = grid.next[item]
    grid.row_of[item] = -1
    grid.tokens[cell] -= items.tokens[k, item]
    grid.tokens_sq[cell] -= items.tokens_sq[k, item]
    grid.num_samples[cell] -= items.samples[item]
    grid.num_items[cell] -= 1
    if grid.num_items[cell] > 0 or k == 0:
        write_seconds(cost, grid, cell)
        return
    count = grid.first.shape[1]
    slot = cell % count
    grid.level[cell] = 0
    for r in range(cell // count, cell // count + (1 << k)):
        grid.first[r, slot] = r
        write_seconds(cost, grid, r * count + slot)


@kernel
def is_room(cost: GridCost, items: GridItems, grid: Grid, cell: int, k: int, item: int) -> bool:
    """Whether the row at a cell stays within its capacity if an item joins; k is the level."""
    tokens = level_tokens(cost, k, grid.tokens[cell] + items.tokens[k, item])
    limit = cost.capacity[k] if grid.num_items[cell] > 0 else cost.alone[k]
    return tokens <= int(limit)


@kernel
def is_open(grid: Grid, rank: int, slot: int, k: int) -> bool:
    """Whether an item may go into a row of level k that begins at this cell: there is one, or the
    block's cells are empty."""
    count = grid.first.shape[1]
    cell = rank * count + slot
    if grid.first[rank, slot] != rank:
        return False
    if grid.num_items[cell] > 0:
        return int(grid.level[cell]) == k
    held = 0
    for r in range(rank + 1, rank + (1 << k)):
        held += grid.num_items[r * count + slot]
    return held == 0


@kernel
def swap_blocks(grid: Grid, rank: int, slot: int, other: int, other_slot: int, width: int) -> None:
    """Exchange what two blocks of `width` ranks hold; no row reaches out of them."""
    count = grid.first.shape[1]
    for r in range(width):
        a = (rank + r) * count + slot
        b = (other + r) * count + other_slot
        for cells in (grid.head, grid.tokens, grid.tokens_sq, grid.num_samples):
            kept = cells[a]
            cells[a] = cells[b]
            cells[b] = kept
        for cells in (grid.num_items, grid.level):
            kept = cells[a]
            cells[a] = cells[b]
            cells[b] = kept
        first = grid.first[rank + r, slot]
        grid.first[rank + r, slot] = grid.first[other + r, other_slot] - other + rank
        grid.first[other + r, other_slot] = first - rank + other
        seconds = grid.seconds[rank + r, slot]
        grid.seconds[rank + r, slot] = grid.seconds[other + r, other_slot]
        grid.seconds[other + r, other_slot] = seconds
        for cell in (a, b):
            item = grid.head[cell]
            while item >= 0:
                grid.row_of[item] = cell
                item = grid.next[item]


@kernel
def grid_seconds(cost: GridCost, grid: Grid, ops: RankOps, end: Floats) -> float:
    """Simulated seconds of the step; inf above the cap on live tokens or with forbidden padding.

    Args:
        end: float64 [dp, operations], written: when each operation ends. In lockstep all ranks
            are alike, and only the first one is written.
    """
    dp, count = grid.first.shape
    for rank in range(dp):
        for slot in range(count):
            is_empty = grid.num_items[grid.first[rank, slot] * count + slot] == 0
            if is_empty and not cost.allows_padding:
                return np.inf
    if cost.max_live > 0:
        amounts = np.empty(count)
        for rank in range(dp):
            for slot in range(count):
                cell = grid.first[rank, slot] * count + slot
                k = grid.level[cell]
                amounts[slot] = level_tokens(cost, k, grid.tokens[cell]) / (1 << k)
            if peak_live(ops, amounts) > cost.max_live:
                return np.inf
    if not cost.lockstep:
        return coupled_seconds(ops, grid.seconds, grid.first, end)
    slowest = np.zeros((1, count))
    for rank in range(dp):
        for slot in range(count):
            slowest[0, slot] = max(slowest[0, slot], grid.seconds[rank, slot])
    return coupled_seconds(ops, slowest, np.zeros((1, count), dtype=np.int64), end)
