"""Items into bins: first-fit with one capacity, and packing to a target amount of work per bin.

Sizes are padded tokens. An item larger than the capacity is alone in its bin. Packing to targets is
the longest-processing-time rule (Graham 1969) with the token budget as a hard cap: the heaviest
item goes into the bin that is furthest below its target, among the bins with room for it.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from megapack.base.arrays import Bools, Floats, Ints
from megapack.base.jit import kernel
from megapack.base.loops import copy_into

# Heap nodes that `_near_top` checks before the emptiest row is taken: the top 4 levels, 1 + 2 + 4 +
# 8. Chosen by hand.
_TOP_NODES = 15

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
    sizes: Ints,
    work: Floats,
    targets: Floats,
    capacity: int,
    taken: Ints | None = None,
    order: Ints | None = None,
) -> Ints | None:
    """Fill rows towards their targets.

    With n >= R no row stays empty.

    Args:
        sizes: int64 [n], padded tokens.
        work: float64 [n], the work that the targets count.
        targets: float64 [R], work that each row should get.
        capacity: tokens per row. A larger item is alone in its row.
        taken: int64 [R], tokens that rows hold already; None: all rows are empty.
        order: `heaviest_first` of the items, if it is known.

    Returns:
        row_of: int64 [n]; None if this rule finds no row for an item.
    """
    order = heaviest_first(sizes, work) if order is None else order
    # A max-heap of rows by missing work: a descending list is one.
    heap = np.argsort(-targets, kind="stable")
    taken = np.zeros(targets.size, dtype=np.int64) if taken is None else taken
    rows = np.empty(sizes.size, dtype=np.int64)
    if not _pack(sizes[order], work[order], targets.copy(), heap, taken, capacity, rows):
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


@kernel
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
def _pack(
    sizes: Ints,
    work: Floats,
    missing: Floats,
    heap: Ints,
    taken: Ints,
    capacity: int,
    row_of: Ints,
) -> bool:
    """Write each item's row to `row_of`; returns whether all items found one.

    Args:
        sizes, work: of the items, most work first.
        missing: float64 [R], work that each row's target still lacks; changed in place.
        heap: a max-heap of rows by `missing`; changed in place.
        taken: int64 [R], tokens that rows hold already.
    """
    num_rows = missing.size
    free = capacity - taken
    # A max-tree over `free`, made when it is first needed. Rows that do not exist have -1.
    room = np.empty(0, dtype=np.int64)
    used = taken > 0
    num_empty = 0
    for row in range(num_rows):
        if not used[row]:
            num_empty += 1
    # The heap node of each row.
    node_of = np.empty(num_rows, dtype=np.int64)
    for node in range(num_rows):
        node_of[heap[node]] = node
    for item in range(sizes.size):
        # As many items left as empty rows: each must go into an empty one.
        must_open = sizes.size - item <= num_empty
        row = -1
        if not must_open:
            row = _near_top(sizes[item], heap, missing, free, used, capacity)
        if row < 0:
            if room.size == 0:
                room = max_tree(free, -1)
            # An unused row has the whole capacity, every other row less, so one is found first.
            row = largest_leaf(room)
            alone = must_open or sizes[item] > capacity
            if used[row] if alone else free[row] < sizes[item]:
                return False
        row_of[item] = row
        if not used[row]:
            used[row] = True
            num_empty -= 1
        free[row] = free[row] - sizes[item] if sizes[item] <= capacity else 0
        if room.size > 0:
            set_leaf(room, row, free[row])
        missing[row] -= work[item]
        sift_down(heap, node_of, missing, node_of[row])
    return True


@kernel
def _near_top(
    size: int, heap: Ints, missing: Floats, free: Ints, used: Bools, capacity: int
) -> int:
    """The row near the top of the heap with room and the most missing work; -1 if none has room."""
    best = -1
    for node in range(min(_TOP_NODES, heap.size)):
        row = heap[node]
        fits = free[row] >= size if size <= capacity else not used[row]
        if fits and (best < 0 or missing[row] > missing[best]):
            best = row
            if node == 0:
                break  # No row misses more than the top of the heap.
    return best


@kernel
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


@kernel
def largest_leaf(tree: Tree) -> int:
    """The leaf of a max-tree with the largest value, the first of several."""
    node = 1
    while 2 * node < tree.size:
        node *= 2
        if tree[node] < tree[node // 2]:
            node += 1
    return node - tree.size // 2


@kernel
def sift_down(heap: Ints, node_of: Ints, key: Floats, node: int) -> None:
    """Sift the row at a heap node down after its key has decreased."""
    row = heap[node]
    while True:
        child = 2 * node + 1
        if child >= heap.size:
            break
        if child + 1 < heap.size and key[heap[child + 1]] > key[heap[child]]:
            child += 1
        if key[heap[child]] <= key[row]:
            break
        heap[node] = heap[child]
        node_of[heap[node]] = node
        node = child
    heap[node] = row
    node_of[row] = node
