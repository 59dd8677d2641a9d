"""Items choose their rows on a board, one by one.

Each position has a target: the seconds that a row there should take. An item goes over as few ranks
as a position's target allows, and into the row that then has the most room left.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megapack.base.arrays import Floats, Ints
from megapack.base.jit import kernel
from megapack.planner.bins import sift_down
from megapack.planner.board import (
    Board,
    RowCost,
    clear_row,
    first_rank,
    fits,
    item_seconds,
    put,
    row_seconds,
    take,
)
from megapack.planner.items import Items
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


class FillRule(NamedTuple):
    """How items choose their rows."""

    order: Ints
    """int64: items, in the order in which they choose."""
    least: Ints
    """int64 [I]: the least level of a row that holds the item."""
    targets: Floats
    """float64 [M]: seconds that the rows at each position should take."""


def fill_rule(items: Items, cost: RowCost, work: Floats) -> FillRule | None:
    """The rule of these items, without targets; None if an item fits into no row.

    Args:
        work: float64 [I], the items with the most work choose first.
    """
    levels = range(cost.unit.size)
    tokens = np.stack([items.at_width(1 << level).aligned for level in levels])
    fits = tokens <= cost.capacity[:, None]
    # The widest of the rows in which it may be alone for an item that fits on no level.
    may = tokens <= cost.alone[:, None]
    widest = len(levels) - 1 - np.argmax(may[::-1], axis=0)
    least = np.where(fits.any(axis=0), np.argmax(fits, axis=0), widest)
    if not may.any(axis=0).all():
        return None
    order = np.lexsort((np.arange(work.size), -work, -least))
    return FillRule(order, least, np.zeros(0))


def fill_all(board: Board, rule: FillRule, stretch: float) -> bool:
    """Put all items of a rule into rows; returns whether they find some, and no row stays empty
    where padding is not allowed.

    Args:
        stretch: see `fill_board`.
    """
    none = np.zeros(1, dtype=np.int64)
    if not fill_board(board, rule, rule.order, stretch, none, 0.0):
        return False
    return board.cost.allows_padding or bool(close_gaps(board, rule.least))


@kernel
def fill_board(
    board: Board, rule: FillRule, order: Ints, stretch: float, random: Ints, noise: float
) -> bool:
    """Put items that are in no row into rows; returns whether all of them found one.

    Args:
        order: these items, in the order in which they choose.
        stretch: a row may take this many times its target before its item goes over more ranks.
        noise: the choice is changed at random by up to this part of a mean target.
    """
    least, targets = rule.least, rule.targets
    mean = _mean_target(targets)
    last = order.size
    small = _SMALL * mean
    if noise == 0:
        # Heavy items come first within a least level, and the last of them need only one rank.
        while last > 0 and least[order[last - 1]] == 0:
            if item_seconds(board, order[last - 1]) >= small:
                break
            last -= 1
    for item in order[:last]:
        rank, position, k = _best_place(
            board, item, least[item], targets, mean, stretch, random, noise
        )
        if rank < 0:
            return False
        put(board, item, rank, position, k)
    return _fill_small(board, order[last:], targets)


@kernel
def _mean_target(targets: Floats) -> float:
    """The mean of the targets; 1 if all are 0, as with a cost model without coefficients."""
    # Added one by one: numpy and numba add arrays in different orders.
    total = 0.0
    for target in targets:
        total += target
    mean = total / targets.size
    return float(mean) if mean > 0 else 1.0


@kernel
def _fill_small(board: Board, order: Ints, targets: Floats) -> bool:
    """Put each item into the row with the most room up to its target; whether all found one."""
    dp, count = board.rows.shape
    if order.size == 0:
        return True
    missing = np.empty(dp * count)
    cell_of = np.empty(dp * count, dtype=np.int64)
    rows = np.empty(dp * count, dtype=np.int64)
    size = 0
    for rank in range(dp):
        for position in range(count):
            if first_rank(board, rank, position) == rank:
                row = board.rows[rank, position]
                missing[row] = targets[position] - board.row_seconds[row]
                cell_of[row] = rank * count + position
                rows[size] = row
                size += 1
    rows = rows[:size]
    heap = rows[np.argsort(-missing[rows], kind="mergesort")]
    node_of = np.empty(dp * count, dtype=np.int64)
    for node in range(size):
        node_of[heap[node]] = node
    for item in order:
        best = _roomiest(board, item, heap[:_TOP_NODES], missing)
        if best < 0:
            best = _roomiest(board, item, rows, missing)
        if best < 0:
            return False
        cell = cell_of[best]
        put(board, item, cell // count, cell % count, board.level[best])
        missing[best] = targets[cell % count] - board.row_seconds[best]
        sift_down(heap, node_of, missing, node_of[best])
    return True


@kernel
def _roomiest(board: Board, item: int, rows: Ints, missing: Floats) -> int:
    """The row with the most missing seconds among those within whose limit an item may join; -1
    if there is none."""
    best = -1
    for row in rows:
        is_better = best < 0 or missing[row] > missing[best]
        if is_better and fits(board, row, board.level[row], -1, item):
            best = row
    return best


@kernel
def close_gaps(board: Board, least: Ints) -> bool:
    """Put items into all rows without items; returns whether none is left.

    An empty row gets an item of the slowest row of several items. If no row has several, the rows
    beside its cell become one row, over the cell too.
    """
    dp, count = board.rows.shape
    for rank in range(dp):
        for position in range(count):
            if board.num_items[board.rows[rank, position]] > 0:
                continue
            slowest = -1
            for row in range(board.head.size):
                if board.num_items[row] < 2 or least[board.head[row]] > 0:
                    continue
                if board.piece_of[row] >= 0:
                    continue
                if slowest < 0 or board.row_seconds[row] > board.row_seconds[slowest]:
                    slowest = row
            if slowest >= 0:
                item = board.head[slowest]
                take(board, item)
                put(board, item, rank, position, 0)
            elif not _widen_into(board, rank, position):
                return False
    return True


@kernel
def _widen_into(board: Board, rank: int, position: int) -> bool:
    """Make one row of the smallest block around an empty cell that has items; whether it fits."""
    dp = board.counts.size
    taken = np.empty(board.row_of.size, dtype=np.int64)
    for k in range(1, board.cost.unit.size):
        width = 1 << k
        low = rank - rank % width
        if low + width > dp:
            return False
        for r in range(low, low + width):
            if board.piece_of[board.rows[r, position]] >= 0:
                return False
        # No row reaches out of the block: a part of the block is empty.
        size = 0
        for r in range(low, low + width):
            size = clear_row(board, r, position, taken, size)
        for item in taken[:size]:
            put(board, item, low, position, k)
        if size > 0:
            row = board.rows[low, position]
            return bool(board.tokens[row] <= board.cost.capacity[k])
    return False


@kernel
def _best_place(
    board: Board,
    item: int,
    least: int,
    targets: Floats,
    mean: float,
    stretch: float,
    random: Ints,
    noise: float,
) -> tuple[int, int, int]:
    """First rank, position and level of the row that suits an item best; -1, 0, 0 if no row has
    room."""
    dp, count = board.rows.shape
    cost = board.cost
    best = np.inf
    place = (-1, 0, 0)
    for k in range(least, board.cost.unit.size):
        width = 1 << k
        for position in range(count):
            goal = targets[position]
            for rank in range(0, dp - width + 1, width):
                # A row of this level that begins here, or a block of empty cells. It is read here
                # and not by a kernel of its own: a call for each cell takes four times as long.
                row = board.rows[rank, position]
                is_empty = board.num_items[row] == 0
                held = 0
                for r in range(rank + 1, rank + width):
                    held += board.num_items[board.rows[r, position]]
                if (held > 0) if is_empty else (board.level[row] != k):
                    continue
                tokens = board.tokens[row] + board.item_tokens[k, item]
                if tokens > (cost.alone[k] if is_empty else cost.capacity[k]):
                    continue
                tokens_sq = board.tokens_sq[row] + board.item_tokens_sq[k, item]
                num_samples = board.num_samples[row] + board.item_samples[item]
                seconds = row_seconds(cost, k, tokens, tokens_sq, num_samples)
                # Less is better: room that is left, then time over the target, then new width.
                value = (seconds - goal) / mean
                if seconds > goal * stretch:
                    value += _OVER * (seconds - goal * stretch) / mean
                if k > 0 and is_empty:
                    value += _WIDER * k
                if noise > 0:
                    value += noise * next_random(random, RANDOM_PARTS) / RANDOM_PARTS
                if value < best:
                    best = value
                    place = (rank, position, k)
    return place
