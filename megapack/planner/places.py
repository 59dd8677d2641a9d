"""The best place for an item on a board, without a look at every cell.

A place is a row, or an aligned block of empty cells, which may become a row. The places of each
level are the leaves of a binary tree, position after position. A node knows how good a place below
it can be at best, and how many tokens it can take at most, so that a search leaves out most nodes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megapack.base.arrays import Floats, Ints
from megapack.base.jit import kernel
from megapack.planner.board import Board, put, row_seconds

# All constants of this module were chosen by hand. docs/planner.md measures the whole search.

# Choice of a row: a second over the stretched target counts as this many seconds of room left.
_OVER = 4.0
# Choice of a row: twice the ranks count as this part of a mean target, so that an item is cut
# further only if a narrower row would be over its target.
_WIDER = 0.5
# Values that differ by this part are equal: more than rounding in fp64, and less than one token.
_ROUNDING = 1e-12
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
    board: Board, places: Places, goals: Goals, item: int, least: int
) -> tuple[int, int, int]:
    """First rank, position and level of the place with the least value for an item; -1, 0, 0 if
    none has room.

    Of equal ones it is the one of the least level, then position, then rank.

    Args:
        least: the least level.
    """
    dp = board.rows.shape[0]
    cost = board.cost
    best = np.inf
    place = (-1, 0, 0)
    waiting = places.waiting
    for k in range(least, places.begin.size):
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
        while size > 0:
            size -= 1
            node = waiting[size]
            if places.room[begin + node] < tokens:
                continue
            bound = _bound(places, goals, begin + node, seconds)
            margin = _ROUNDING * (1 + abs(bound))
            if bound > best + margin:
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
