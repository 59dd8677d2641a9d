"""Items choose their rows on a board, one by one, the heaviest first.

Each cell has a target: the seconds that a row there should take. A place is a row, or an aligned
block of empty cells, which may become a row. On each level, the place with the most seconds missing
up to its target is the best of those with room; an item goes to the level where it then suits best:
over as few ranks as the target allows.

The places of a level are the leaves of two max-trees, of their missing seconds and of their room,
so that a search leaves out most of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megapack.base.arrays import Floats, Ints
from megapack.base.jit import inner, kernel
from megapack.base.loops import copy_into
from megapack.planner.bins import best_leaf, max_tree, set_leaf
from megapack.planner.board import Board, RowCost, put, row_seconds
from megapack.planner.items import Items

# All constants of this module were chosen by hand. docs/maintainers/planner.md says how to judge a
# change.

# Choice of a row: a second over the stretched target counts as this many seconds of room left.
_OVER = 4.0
# Choice of a row: twice the ranks count as this part of a mean target, so that an item is cut
# further only if a narrower row would be over its target.
_WIDER = 0.5


class FillRule(NamedTuple):
    """How items choose their rows."""

    order: Ints
    """int64: items, in the order in which they choose."""
    least: Ints
    """int64 [I]: the least level of a row that holds the item."""
    targets: Floats
    """float64 [dp, M]: seconds that the row of each cell should take; of a row over several ranks,
    the first one's."""


def fill_rule(items: Items, cost: RowCost, work: Floats, targets: Floats) -> FillRule | None:
    """The rule of these items; None if an item fits into no row.

    Args:
        work: float64 [I], the items with the most work choose first.
        targets: float64 [dp, M], seconds.
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
    return FillRule(order, least, targets)


@kernel
def fill_board(board: Board, rule: FillRule, stretch: float) -> bool:
    """Put the items of a rule, which are in no row, into rows; returns whether all of them found
    one, and no row is left without items where padding is not allowed.

    Args:
        stretch: a row may take this many times its target before its item goes over more ranks;
            inf: each item goes over the fewest ranks that have room for it.
    """
    cost = board.cost
    goals = Goals(rule.targets, _mean_target(rule.targets), stretch)
    places = find_places(board, goals)
    dp, count = board.rows.shape
    # Empty cells that items have to fill.
    num_empty = 0
    for rank in range(dp if not cost.allows_padding else 0):
        for position in range(count):
            num_empty += board.num_items[board.rows[rank, position]] == 0
    left = rule.order.size
    for item in rule.order:
        # As many items left as empty cells: each must go into one, where a row may hold most.
        must_open = left <= num_empty
        left -= 1
        best = np.inf
        rank, position, level = -1, 0, 0
        for k in range(rule.least[item], cost.unit.size):
            size = cost.alone[k] if must_open else board.item_tokens[k, item]
            if stretch == np.inf and rank >= 0:
                break
            leaf = best_leaf(places.missing[k], places.room[k], size)
            if leaf >= 0:
                blocks = dp >> k
                r, p = (leaf % blocks) << k, leaf // blocks
                value = place_value(board, goals, item, k, r, p)
                if value < best:
                    best = value
                    rank, position, level = r, p, k
        if rank < 0:
            return False
        if board.num_items[board.rows[rank, position]] == 0:
            num_empty -= 1 << level
        put_into_place(board, goals, places, item, rank, position, level)
    return bool(cost.allows_padding or num_empty == 0)


@inner
def _mean_target(targets: Floats) -> float:
    """The mean of the targets; 1 if all are 0, as with a cost model without coefficients."""
    # Added one by one: numpy and numba add arrays in different orders.
    total = 0.0
    for target in targets.ravel():
        total += target
    mean = total / targets.size
    return float(mean) if mean > 0 else 1.0


class Goals(NamedTuple):
    """What items look for in a row."""

    targets: Floats
    """float64 [dp, M], see `FillRule`."""
    mean: float
    """Their mean; 1 if all are 0."""
    stretch: float
    """A row may take this many times its target before its item goes over more ranks."""


class Places(NamedTuple):
    """The trees of all levels, see `bins.max_tree`. Leaf `position * blocks + block` of a level is
    the place at block * 2**level, of dp // 2**level blocks at a position."""

    missing: Floats
    """[levels, nodes]: seconds missing up to the target; -inf if there is no place."""
    room: Ints
    """[levels, nodes]: tokens that a row can still take; -1 if there is no place."""


@inner
def find_places(board: Board, goals: Goals) -> Places:
    """The places of a board."""
    dp, count = board.rows.shape
    levels = board.cost.unit.size
    leaves = 1
    while leaves < dp * count:
        leaves *= 2
    places = Places(
        np.full((levels, 2 * leaves), -np.inf), np.full((levels, 2 * leaves), -1, dtype=np.int64)
    )
    for k in range(levels):
        missing = np.full(leaves, -np.inf)
        room = np.full(leaves, -1, dtype=np.int64)
        blocks = dp >> k
        for position in range(count):
            for block in range(blocks):
                if _is_place(board, k, block << k, position):
                    leaf = position * blocks + block
                    missing[leaf], room[leaf] = _left(board, goals, k, block << k, position)
        copy_into(places.missing[k], max_tree(missing, -np.inf))
        copy_into(places.room[k], max_tree(room, -1))
    return places


@inner
def _is_place(board: Board, level: int, rank: int, position: int) -> bool:
    """Whether a row of this level begins here, or a block of empty cells."""
    row = board.rows[rank, position]
    if board.num_items[row] > 0:
        return bool(board.level[row] == level)
    for r in range(rank + 1, rank + (1 << level)):
        if board.num_items[board.rows[r, position]] > 0:
            return False
    return True


@inner
def _left(board: Board, goals: Goals, level: int, rank: int, position: int) -> tuple[float, int]:
    """Seconds missing up to the target of a place, and tokens of room."""
    cost = board.cost
    row = board.rows[rank, position]
    tokens = board.tokens[row]
    seconds = row_seconds(cost, level, tokens, board.tokens_sq[row], board.num_samples[row])
    missing = goals.targets[rank, position] - seconds
    if board.num_items[row] == 0:
        return missing - _WIDER * level * goals.mean, cost.alone[level]
    return missing, cost.capacity[level] - tokens


@inner
def put_into_place(
    board: Board, goals: Goals, places: Places, item: int, rank: int, position: int, level: int
) -> None:
    """Put an item into a place."""
    was_empty = board.num_items[board.rows[rank, position]] == 0
    put(board, item, rank, position, level)
    dp = board.rows.shape[0]
    for k in range(board.cost.unit.size) if was_empty else range(level, level + 1):
        # The blocks of this level that lie in the row or reach out of it.
        blocks = dp >> k
        last = rank + (1 << level) - 1
        for block in range(rank >> k, min(last >> k, blocks - 1) + 1):
            missing, room = -np.inf, -1
            if k == level:
                missing, room = _left(board, goals, level, rank, position)
            set_leaf(places.missing[k], position * blocks + block, missing)
            set_leaf(places.room[k], position * blocks + block, room)


@inner
def place_value(
    board: Board, goals: Goals, item: int, level: int, rank: int, position: int
) -> float:
    """How well an item suits a place, in mean targets: less is better.

    The room that is left counts, then time over the stretched target, then new width.
    """
    row = board.rows[rank, position]
    seconds = row_seconds(
        board.cost,
        level,
        board.tokens[row] + board.item_tokens[level, item],
        board.tokens_sq[row] + board.item_tokens_sq[level, item],
        board.num_samples[row] + board.item_samples[item],
    )
    goal = goals.targets[rank, position]
    value = (seconds - goal) / goals.mean
    if seconds > goal * goals.stretch:
        value += _OVER * (seconds - goal * goals.stretch) / goals.mean
    if level > 0 and board.num_items[row] == 0:
        value += _WIDER * level
    return float(value)
