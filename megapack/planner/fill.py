"""Items choose their rows on a board, one by one.

Each position has a target: the seconds that a row there should take. An item goes over as few ranks
as a position's target allows, and into the row that then has the most room left.

A place is a row, or an aligned block of empty cells, which may become a row. The places of each
level are the leaves of a binary tree, position after position. A node knows how good a place below
it can be at best, and how many tokens it can take at most, so that a search leaves out most nodes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megapack.base.arrays import Floats, Ints
from megapack.base.jit import kernel
from megapack.planner.bins import largest_leaf, max_tree, set_leaf, sift_down
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

# Items of less than this part of a mean target go to the row with the most room left, from a heap:
# looking at all rows for each of 2,048 items takes ten times as long.
_SMALL = 0.25
# Rows at the top of the heap that are tried before all rows are: 1 + 2 + 4 + 8.
_TOP_NODES = 15
# Random numbers between 0 and 1 are multiples of 1/4096.
RANDOM_PARTS = 4096
# Choice of a row: a second over the stretched target counts as this many seconds of room left.
_OVER = 4.0
# Choice of a row: twice the ranks count as this part of a mean target, so that an item is cut
# further only if a narrower row would be over its target.
_WIDER = 0.5
# Values that differ by this part are equal: more than rounding in fp64, and less than one token.
_ROUNDING = 1e-12
# An item looks at so many nodes of a level, and then only at those that could save it a unit of
# padding: of 8,192 places hundreds differ by less. Once it has a place, it stops at the second.
_ALL_VISITED = 32
_MOST_VISITED = 512
# Nodes that wait during a search: at most one for each level of a tree, and one more.
_MOST_WAITING = 64


class Goals(NamedTuple):
    """What items look for in a row."""

    targets: Floats
    """float64 [M]: seconds that the rows at each position should take."""
    mean: float
    """Their mean; 1 if all are 0."""
    stretch: float
    """A row may take this many times its target before its item goes over more ranks."""


class Places(NamedTuple):
    """The trees of all levels. The children of node n are 2 n and 2 n + 1, and the root is 1."""

    begin: Ints
    """[levels]: where a level's nodes begin."""
    leaves: Ints
    """[levels]: leaves of the level, a power of two. Leaf `position * blocks + block` is the place
    of this level at block * 2**level, of dp // 2**level blocks at a position."""
    over: Floats
    """[nodes]: seconds over the target, without padding; the least below a node. inf if there is no
    place."""
    over_stretched: Floats
    """[nodes]: the same over the stretched target."""
    room: Ints
    """[nodes]: tokens that a row can still take; the most below a node. -1 if there is no place."""
    smallest: int
    """Tokens of the smallest item: a row with less room is no place."""
    waiting: Ints
    """Nodes that are still to be searched."""


@kernel
def find_places(board: Board, goals: Goals, smallest: int) -> Places:
    """The places of a board for items of so many tokens or more."""
    dp, count = board.rows.shape
    levels = board.cost.unit.size
    begin = np.zeros(levels, dtype=np.int64)
    leaves = np.ones(levels, dtype=np.int64)
    size = 0
    for k in range(levels):
        while leaves[k] < (dp >> k) * count:
            leaves[k] *= 2
        begin[k] = size
        size += 2 * leaves[k]
    places = Places(
        begin,
        leaves,
        np.full(size, np.inf),
        np.full(size, np.inf),
        np.full(size, -1, dtype=np.int64),
        smallest,
        np.empty(_MOST_WAITING, dtype=np.int64),
    )
    # Blocks without items, of the level before.
    empty = np.zeros((count, dp), dtype=np.bool_)
    for k in range(levels):
        for position in range(count):
            for block in range(dp >> k):
                if k == 0:
                    empty[position, block] = board.num_items[board.rows[block, position]] == 0
                else:
                    both = empty[position, 2 * block] and empty[position, 2 * block + 1]
                    empty[position, block] = both
                row = board.rows[block << k, position]
                if empty[position, block] or (board.num_items[row] > 0 and board.level[row] == k):
                    leaf = begin[k] + leaves[k] + position * (dp >> k) + block
                    _set_leaf(board, places, goals, leaf, k, block << k, position)
        for node in range(begin[k] + leaves[k] - 1, begin[k], -1):
            _sum_up(places, begin[k], node - begin[k])
    return places


@kernel
def _set_leaf(
    board: Board, places: Places, goals: Goals, leaf: int, level: int, rank: int, position: int
) -> None:
    """Write a leaf that is a place; it is none if it has too little room."""
    cost = board.cost
    row = board.rows[rank, position]
    is_empty = board.num_items[row] == 0
    room = (cost.alone[level] if is_empty else cost.capacity[level]) - board.tokens[row]
    if room < places.smallest:
        _close(places, leaf)
        return
    seconds = cost.fixed[level] + cost.per_token[level] * board.tokens[row]
    seconds += cost.per_token_sq[level] * board.tokens_sq[row]
    seconds += cost.per_sample[level] * board.num_samples[row]
    goal = goals.targets[position]
    places.over[leaf] = seconds - goal
    if is_empty:
        places.over[leaf] += _WIDER * level * goals.mean
    places.over_stretched[leaf] = seconds - goal * goals.stretch
    places.room[leaf] = room


@kernel
def _close(places: Places, leaf: int) -> None:
    """A leaf that is no place."""
    places.over[leaf] = np.inf
    places.over_stretched[leaf] = np.inf
    places.room[leaf] = -1


@kernel
def _sum_up(places: Places, begin: int, node: int) -> None:
    """Write a node from its children."""
    one = begin + 2 * node
    other = one + 1
    node += begin
    places.over[node] = min(places.over[one], places.over[other])
    places.over_stretched[node] = min(places.over_stretched[one], places.over_stretched[other])
    places.room[node] = max(places.room[one], places.room[other])


@kernel
def _sum_up_to_root(places: Places, begin: int, leaf: int) -> None:
    """Write the nodes above a leaf."""
    node = (leaf - begin) // 2
    while node > 0:
        _sum_up(places, begin, node)
        node //= 2


@kernel
def put_into_place(
    board: Board, places: Places, goals: Goals, item: int, rank: int, position: int, level: int
) -> None:
    """Put an item into a place."""
    was_empty = board.num_items[board.rows[rank, position]] == 0
    put(board, item, rank, position, level)
    dp = board.rows.shape[0]
    for k in range(places.begin.size) if was_empty else range(level, level + 1):
        # The blocks of this level that lie in the row or reach out of it.
        blocks = dp >> k
        last = rank + (1 << level) - 1
        for block in range(rank >> k, min(last >> k, blocks - 1) + 1):
            leaf = places.begin[k] + places.leaves[k] + position * blocks + block
            if k == level:
                _set_leaf(board, places, goals, leaf, k, rank, position)
            else:
                _close(places, leaf)
            _sum_up_to_root(places, places.begin[k], leaf)


@kernel
def best_place(
    board: Board, places: Places, goals: Goals, item: int, least: int, most: int
) -> tuple[int, int, int]:
    """First rank, position and level of a place for an item; -1, 0, 0 if none has room.

    Its value is the least, or on large boards less than a unit of padding above it. Of equal ones
    it is the one of the least level, then position, then rank.

    Args:
        least, most: the least and the highest level.
    """
    dp = board.rows.shape[0]
    cost = board.cost
    best = np.inf
    place = (-1, 0, 0)
    waiting = places.waiting
    for k in range(least, most + 1):
        begin = places.begin[k]
        leaves = places.leaves[k]
        blocks = dp >> k
        tokens = board.item_tokens[k, item]
        seconds = cost.per_token[k] * tokens
        seconds += cost.per_token_sq[k] * board.item_tokens_sq[k, item]
        seconds += cost.per_sample[k] * board.item_samples[item]
        # The best leaf of this level; equal ones before it are better.
        best_leaf = 0
        waiting[0] = 1
        size = 1
        visited = 0
        padding = cost.per_token[k] * cost.unit[k] / goals.mean
        while size > 0 and (visited < _MOST_VISITED or place[0] < 0):
            visited += 1
            size -= 1
            node = waiting[size]
            if places.room[begin + node] < tokens:
                continue
            bound = _bound(places, goals, begin + node, seconds)
            margin = _ROUNDING * (1 + abs(bound))
            if bound > best + (margin if visited <= _ALL_VISITED else -padding):
                continue
            if bound > best - margin and _first_leaf(node, leaves) >= best_leaf:
                continue
            if node >= leaves:
                position = (node - leaves) // blocks
                rank = ((node - leaves) % blocks) << k
                value = place_value(board, goals, item, k, rank, position)
                if value < best or (value == best and node < best_leaf):
                    best = value
                    best_leaf = node
                    place = (rank, position, k)
                continue
            one = _bound(places, goals, begin + 2 * node, seconds)
            other = _bound(places, goals, begin + 2 * node + 1, seconds)
            # The better child is searched first, and of equal ones the first.
            is_swapped = other < one - margin
            waiting[size] = 2 * node + (0 if is_swapped else 1)
            waiting[size + 1] = 2 * node + (1 if is_swapped else 0)
            size += 2
    return place


@kernel
def _bound(places: Places, goals: Goals, node: int, seconds: float) -> float:
    """What no place below a node can undercut, for an item of so many seconds."""
    value = (places.over[node] + seconds) / goals.mean
    return float(value + _OVER * max(places.over_stretched[node] + seconds, 0.0) / goals.mean)


@kernel
def _first_leaf(node: int, leaves: int) -> int:
    """The first leaf below a node."""
    while node < leaves:
        node *= 2
    return node


@kernel
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
    goal = goals.targets[position]
    value = (seconds - goal) / goals.mean
    if seconds > goal * goals.stretch:
        value += _OVER * (seconds - goal * goals.stretch) / goals.mean
    if level > 0 and board.num_items[row] == 0:
        value += _WIDER * level
    return float(value)


class FillRule(NamedTuple):
    """How items choose their rows."""

    order: Ints
    """int64: items, in the order in which they choose."""
    least: Ints
    """int64 [I]: the least level of a row that holds the item."""
    targets: Floats
    """float64 [M]: seconds that the rows at each position should take."""
    most: Ints
    """int64 [I]: the highest level of a row that an item chooses; small ones may join any row."""


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
    return FillRule(order, least, np.zeros(0), np.full_like(least, len(levels) - 1))


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
    goals = Goals(rule.targets, _mean_target(rule.targets), stretch)
    if noise > 0:
        for item in order:
            rank, position, k = _noisy_place(board, goals, rule, item, random, noise)
            if rank < 0:
                return False
            put(board, item, rank, position, k)
        return True
    # Heavy items come first within a least level, and the last of them need only one rank.
    last = order.size
    small = _SMALL * goals.mean
    while last > 0 and rule.least[order[last - 1]] == 0:
        if item_seconds(board, order[last - 1]) >= small:
            break
        last -= 1
    return _fill_heavy(board, rule, goals, order[:last]) and _fill_small(
        board, order[last:], rule.targets
    )


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
def _fill_heavy(board: Board, rule: FillRule, goals: Goals, order: Ints) -> bool:
    """Put each item into the place that suits it best; whether all found one."""
    if order.size == 0:
        return True
    smallest = board.item_tokens[0, order[0]]
    for item in order:
        smallest = min(smallest, board.item_tokens[0, item])
    places = find_places(board, goals, smallest)
    for item in order:
        least, most = rule.least[item], rule.most[item]
        rank, position, k = best_place(board, places, goals, item, least, most)
        if rank < 0:
            return False
        put_into_place(board, places, goals, item, rank, position, k)
    return True


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
    # Trees over all rows, made when they are first needed.
    open_rows, full_rows = np.empty(0), np.empty(0, dtype=np.int64)
    leaf_of = np.empty(dp * count, dtype=np.int64)
    for item in order:
        best = _roomiest(board, item, heap[:_TOP_NODES], missing)
        if best < 0:
            if open_rows.size == 0:
                open_rows = max_tree(missing[rows], -np.inf)
                full_rows = max_tree(np.full(size, -1), -1)
                for leaf in range(size):
                    leaf_of[rows[leaf]] = leaf
            best = _roomiest_of_all(board, item, rows, missing, open_rows, full_rows)
        if best < 0:
            return False
        cell = cell_of[best]
        put(board, item, cell // count, cell % count, board.level[best])
        missing[best] = targets[cell % count] - board.row_seconds[best]
        sift_down(heap, node_of, missing, node_of[best])
        if open_rows.size > 0:
            set_leaf(open_rows, leaf_of[best], missing[best])
            set_leaf(full_rows, leaf_of[best], -1)
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
def _roomiest_of_all(
    board: Board, item: int, rows: Ints, missing: Floats, open_rows: Floats, full_rows: Ints
) -> int:
    """`_roomiest` of all rows.

    Items become smaller, so a row without room is put aside until an item comes that is as small as
    its room.

    Args:
        open_rows: a max-tree over the missing seconds of rows; -inf for those that are put aside.
        full_rows: a max-tree over the room of rows that are put aside, in tokens; -1 for others.
    """
    while full_rows[1] >= board.item_tokens[0, item]:
        leaf = largest_leaf(full_rows)
        set_leaf(full_rows, leaf, -1)
        set_leaf(open_rows, leaf, missing[rows[leaf]])
    while open_rows[1] > -np.inf:
        leaf = largest_leaf(open_rows)
        row = rows[leaf]
        level = board.level[row]
        if fits(board, row, level, -1, item):
            return int(row)
        cost = board.cost
        limit = cost.alone[level] if board.num_items[row] == 0 else cost.capacity[level]
        set_leaf(open_rows, leaf, -np.inf)
        set_leaf(full_rows, leaf, limit - board.tokens[row])
    return -1


@kernel
def close_gaps(board: Board, least: Ints) -> bool:
    """Put items into all rows without items; returns whether none is left.

    An empty row gets an item of the slowest row of several items. If no row has several, the rows
    beside its cell become one row, over the cell too.
    """
    dp, count = board.rows.shape
    seconds = np.empty(board.head.size)
    for row in range(seconds.size):
        seconds[row] = _seconds_of_several(board, least, row)
    tree = max_tree(seconds, -np.inf)
    for rank in range(dp):
        for position in range(count):
            if board.num_items[board.rows[rank, position]] > 0:
                continue
            if tree[1] > -np.inf:
                slowest = largest_leaf(tree)
                item = board.head[slowest]
                take(board, item)
                put(board, item, rank, position, 0)
                set_leaf(tree, slowest, _seconds_of_several(board, least, slowest))
            elif not _widen_into(board, rank, position):
                return False
            row = board.rows[rank, position]
            set_leaf(tree, row, _seconds_of_several(board, least, row))
    return True


@kernel
def _seconds_of_several(board: Board, least: Ints, row: int) -> float:
    """Seconds of a row of several items that may give one to a row of one rank; -inf of others."""
    if board.num_items[row] < 2 or least[board.head[row]] > 0 or board.piece_of[row] >= 0:
        return -np.inf
    return float(board.row_seconds[row])


@kernel
def _widen_into(board: Board, rank: int, position: int) -> bool:
    """Make one row of the smallest block around an empty cell that has items; whether it fits."""
    dp = board.rows.shape[0]
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
def _noisy_place(
    board: Board, goals: Goals, rule: FillRule, item: int, random: Ints, noise: float
) -> tuple[int, int, int]:
    """`best_place` with random additions to the values."""
    dp, count = board.rows.shape
    cost = board.cost
    best = np.inf
    place = (-1, 0, 0)
    for k in range(rule.least[item], rule.most[item] + 1):
        width = 1 << k
        for position in range(count):
            for rank in range(0, dp - width + 1, width):
                # A row of this level that begins here, or a block of empty cells.
                row = board.rows[rank, position]
                is_empty = board.num_items[row] == 0
                if not is_empty and board.level[row] != k:
                    continue
                held = 0
                if is_empty:
                    for r in range(rank + 1, rank + width):
                        held += board.num_items[board.rows[r, position]]
                if held > 0:
                    continue
                tokens = board.tokens[row] + board.item_tokens[k, item]
                if tokens > (cost.alone[k] if is_empty else cost.capacity[k]):
                    continue
                # All else only makes the value larger, so most places end here.
                seconds = cost.fixed[k] + cost.per_token[k] * tokens
                tokens_sq = board.tokens_sq[row] + board.item_tokens_sq[k, item]
                seconds += cost.per_token_sq[k] * tokens_sq
                if seconds - goals.targets[position] > best * goals.mean:
                    continue
                value = place_value(board, goals, item, k, rank, position)
                if value < best:
                    value += noise * next_random(random, RANDOM_PARTS) / RANDOM_PARTS
                if value < best:
                    best = value
                    place = (rank, position, k)
    return place
