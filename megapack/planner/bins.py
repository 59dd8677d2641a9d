"""Items into bins: first-fit with one capacity, and packing to a target amount of work per bin.

Sizes are padded tokens. An item larger than the capacity is alone in its bin. Packing to targets is
the longest-processing-time rule (Graham 1969) with the token budget as a hard cap: the heaviest
item goes into the bin that is furthest below its target, among the bins with room for it.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from megapack.base.arrays import Floats, Ints
from megapack.base.jit import inner, kernel
from megapack.base.loops import copy_into

# Nodes that wait during a search: at most one for each level of a tree, and one more. Once a leaf
# is found, a search ends after so many nodes: where most leaves have no room, hundreds may differ
# by less than a token.
_MOST_WAITING = 64
_MOST_VISITED = 512

Tree = TypeVar("Tree", Ints, Floats)


def first_fit(sizes: Ints, capacity: int) -> tuple[Ints, int]:
    """Put each item, in input order, into the first bin that has room, in O(n log n).

    Sizes 6, 6, 4, 4 with capacity 10 go into bins 0, 1, 0, 1.

    Args:
        sizes: int64 [n], tokens per item.
        capacity: tokens per bin.

    Returns:
        bin_of: int64 [n], bins numbered in order of opening.
        num_bins: number of bins opened.
    """
    bin_of, num_bins = _first_fit(sizes, np.arange(sizes.size), capacity)
    return bin_of, int(num_bins)


def first_fit_decreasing(sizes: Ints, capacity: int) -> tuple[Ints, int]:
    """First-fit, largest item first (Johnson 1973): at most 11/9 of the fewest bins, and one more.

    Arguments and results as in `first_fit`.
    """
    bin_of, num_bins = _first_fit(sizes, np.argsort(-sizes, kind="stable"), capacity)
    return bin_of, int(num_bins)


def fewest_bins_bound(sizes: Ints, capacity: int) -> int:
    """Lower bound of the number of bins: L2 of Martello and Toth (1990).

    For a threshold k, items larger than capacity - k need a bin each and share it with no item of
    size k or more. Items larger than half the capacity also need a bin each. The space that these
    leave free must hold the items of size k up to half the capacity, or they need more bins. The
    bound is the largest over all k: sizes 7, 7, 4, 4 with capacity 10 need 3 bins, as no 4 fits
    beside a 7.
    """
    over = int((sizes > capacity).sum())
    rising = np.sort(sizes[sizes <= capacity])
    if not rising.size:
        return over
    ends = np.concatenate([[0], np.cumsum(rising)])
    half = int(np.searchsorted(rising, capacity // 2, side="right"))
    k = np.unique(np.concatenate([[0], rising[:half]]))
    first = np.searchsorted(rising, k, side="left")
    large = np.searchsorted(rising, capacity - k, side="right")
    large = np.maximum(large, half)
    num_over_half = rising.size - half
    # Space left beside items larger than half the capacity but not than capacity - k.
    free = (large - half) * capacity - (ends[large] - ends[half])
    middle = np.maximum(ends[half] - ends[np.minimum(first, half)] - free, 0)
    return over + num_over_half + int((-(-middle // capacity)).max())


def heaviest_first(sizes: Ints, work: Floats) -> Ints:
    """Items in the order in which they are packed to targets: most work first, then most tokens."""
    return np.lexsort((-sizes, -work))


def pack_to_targets(
    sizes: Ints, work: Floats, targets: Floats, capacity: int, order: Ints | None = None
) -> Ints | None:
    """Fill rows towards their targets.

    With n >= R no row stays empty.

    Args:
        sizes: int64 [n], padded tokens.
        work: float64 [n], the work that the targets count.
        targets: float64 [R], work that each row should get.
        capacity: tokens per row. A larger item is alone in its row.
        order: `heaviest_first` of the items, if it is known.

    Returns:
        row_of: int64 [n]; None if this rule finds no row for an item.
    """
    order = heaviest_first(sizes, work) if order is None else order
    rows = np.empty(sizes.size, dtype=np.int64)
    if not _pack(sizes[order], work[order], targets, capacity, rows):
        return None
    row_of = np.empty(sizes.size, dtype=np.int64)
    row_of[order] = rows
    return row_of


@kernel
def _first_fit(sizes: Ints, order: Ints, capacity: int) -> tuple[Ints, int]:
    """Put each item into the lowest-numbered bin with room; `free` is a max-tree over the bins."""
    n = sizes.size
    # Two neighbouring bins hold more than one capacity, so there are at most twice as many bins as
    # the tokens fill, besides those of items over the capacity. A small tree stays in the cache.
    over = 0
    tokens = 0
    for item in range(n):
        if sizes[item] > capacity:
            over += 1
        else:
            tokens += sizes[item]
    most = min(n, over + 2 * (tokens // max(capacity, 1)) + 2)
    leaves = 1
    while leaves < most:
        leaves *= 2
    free = np.full(2 * leaves, capacity, dtype=np.int64)
    bin_of = np.empty(n, dtype=np.int64)
    num_bins = 0
    for item in order:
        size = sizes[item]
        if size > capacity:
            # The item gets a new bin, which is then full.
            chosen = num_bins
            left = 0
        else:
            node = 1
            while node < leaves:
                node *= 2
                if free[node] < size:
                    node += 1
            chosen = node - leaves
            left = free[node] - size
        bin_of[item] = chosen
        num_bins = max(num_bins, chosen + 1)
        set_leaf(free, chosen, left)
    return bin_of, num_bins


@inner
def set_leaf(tree: Tree, leaf: int, value: float) -> None:
    """Change a leaf of a max-tree; the children of node k are 2 k and 2 k + 1, its root is 1."""
    node = leaf + tree.size // 2
    tree[node] = value
    while node > 1:
        node //= 2
        largest = max(tree[2 * node], tree[2 * node + 1])
        if tree[node] == largest:
            break
        tree[node] = largest


@kernel
def _pack(sizes: Ints, work: Floats, targets: Floats, capacity: int, row_of: Ints) -> bool:
    """Write each item's row to `row_of`; returns whether all items found one.

    Args:
        sizes, work: of the items, most work first.
        targets: float64 [R], work that each row should get.
    """
    num_rows = targets.size
    missing = max_tree(targets, -np.inf)
    # Rows that do not exist have -1.
    room = max_tree(np.full(num_rows, capacity), -1)
    used = np.zeros(num_rows, dtype=np.bool_)
    num_empty = num_rows
    for item in range(sizes.size):
        # As many items left as empty rows: each must go into an empty one, as must an item over the
        # capacity. Only empty rows have the whole capacity.
        alone = sizes.size - item <= num_empty or sizes[item] > capacity
        row = best_leaf(missing, room, capacity if alone else sizes[item])
        if row < 0:
            return False
        row_of[item] = row
        if not used[row]:
            used[row] = True
            num_empty -= 1
        leaf = row + room.size // 2
        # An item takes a token at least, so that its row is no longer empty.
        set_leaf(room, row, max(room[leaf] - max(sizes[item], 1), -1))
        set_leaf(missing, row, missing[leaf] - work[item])
    return True


@inner
def best_leaf(key: Floats, room: Ints, size: int) -> int:
    """The leaf with the largest key among those with so much room, the first of several; -1: none.

    Args:
        key, room: max-trees of as many leaves, see `set_leaf`; -inf: no leaf.
    """
    leaves = key.size // 2
    best = -np.inf
    leaf = -1
    waiting = np.empty(_MOST_WAITING, dtype=np.int64)
    waiting[0] = 1
    num = 1
    visited = 0
    while num > 0 and (visited < _MOST_VISITED or leaf < 0):
        visited += 1
        num -= 1
        node = waiting[num]
        if room[node] < size or key[node] <= best:
            continue
        if node >= leaves:
            best = key[node]
            leaf = node - leaves
            continue
        # The better child is searched first, and of equal ones the first.
        better = 2 * node + (1 if key[2 * node + 1] > key[2 * node] else 0)
        waiting[num] = better ^ 1
        waiting[num + 1] = better
        num += 2
    return leaf


@inner
def max_tree(values: Tree, least: float) -> Tree:
    """A max-tree over the values, see `set_leaf`; leaves without a value have the least one."""
    leaves = 1
    while leaves < values.size:
        leaves *= 2
    tree = np.full(2 * leaves, least)
    copy_into(tree[leaves:], values)
    for node in range(leaves - 1, 0, -1):
        tree[node] = max(tree[2 * node], tree[2 * node + 1])
    return tree
