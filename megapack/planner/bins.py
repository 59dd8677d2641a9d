"""Samples into bins: first-fit-decreasing with one capacity, and packing to a target size per bin.

Sizes are padded tokens. A size above the capacity is alone in its bin. Packing to targets takes the
longest processing time first (Graham 1969), with the token budget as a hard cap beside it: the
costliest sample goes where most of the target is still missing, among the rows with room for it.
"""

from __future__ import annotations

import numpy as np

from megapack.base.arrays import Bools, Floats, Ints
from megapack.base.jit import kernel


def first_fit(sizes: Ints, capacity: int) -> tuple[Ints, int]:
    """Each item, in input order, into the first bin that has room: O(n log n).

    Args:
        sizes: int64 [n], tokens per item.
        capacity: tokens per bin.

    Returns:
        bin_of: int64 [n], numbered in order of opening.
        num_bins: how many were opened.
    """
    bin_of, num_bins = _first_fit(sizes, np.arange(sizes.size), capacity)
    return bin_of, int(num_bins)


def first_fit_decreasing(sizes: Ints, capacity: int) -> tuple[Ints, int]:
    """First-fit, largest first (Johnson 1973): at most 11/9 of the fewest bins and one more.

    Arguments and results as in `first_fit`.
    """
    bin_of, num_bins = _first_fit(sizes, np.argsort(-sizes, kind="stable"), capacity)
    return bin_of, int(num_bins)


def fewest_bins_bound(sizes: Ints, capacity: int) -> int:
    """Bins that no packing can do without: L2 of Martello and Toth (1990).

    For a threshold k, items over capacity - k need a bin each and share it with nothing of size k
    or more; so do items over half the capacity; what the latter leave free must hold the items of
    size k up to half. The bound is the most over all k.
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
    # Free in bins of items over half the capacity that are not over capacity - k.
    free = (large - half) * capacity - (ends[large] - ends[half])
    middle = np.maximum(ends[half] - ends[np.minimum(first, half)] - free, 0)
    return over + num_over_half + int((-(-middle // capacity)).max())


@kernel
def _first_fit(sizes: Ints, order: Ints, capacity: int) -> tuple[Ints, int]:
    """Each item into the lowest-numbered bin that has room; `free` is a max-tree over bins."""
    n = sizes.size
    leaves = 1
    while leaves < n:
        leaves *= 2
    free = np.full(2 * leaves, capacity, dtype=np.int64)
    bin_of = np.empty(n, dtype=np.int64)
    num_bins = 0
    for item in order:
        size = sizes[item]
        if size > capacity:
            # A bin of its own, closed at once.
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
        node = chosen + leaves
        free[node] = left
        while node > 1:
            node //= 2
            free[node] = max(free[2 * node], free[2 * node + 1])
    return bin_of, num_bins


# Heap nodes that are looked at for a row with room before the emptiest row is taken: 4 levels.
_LOOK = 15
# Rows that a packing may look at beyond those before it is given up: a second at most.
_MAX_LOOKS = 500_000_000


def pack_to_targets(sizes: Ints, work: Floats, targets: Floats, capacity: int) -> Ints | None:
    """Fill rows towards their targets.

    Args:
        sizes: int64 [n], padded tokens.
        work: float64 [n], what is balanced.
        targets: float64 [R], work that each row should get; none of them ends empty if n >= R.
        capacity: tokens per row. A size above it is alone in its row.

    Returns:
        row_of: int64 [n]; None where the samples did not fit in this way.
    """
    order = np.lexsort((-sizes, -work))
    row_of = np.empty(sizes.size, dtype=np.int64)
    # A max-heap of rows by what is missing: a falling list is one.
    heap = np.argsort(-targets, kind="stable")
    fits = _pack(sizes, work, order, targets.copy(), heap, capacity, row_of)
    return row_of if fits else None


@kernel
def _pack(
    sizes: Ints,
    work: Floats,
    order: Ints,
    missing: Floats,
    heap: Ints,
    capacity: int,
    row_of: Ints,
) -> bool:
    num_rows = missing.size
    free = np.full(num_rows, capacity, dtype=np.int64)
    empty = num_rows
    used = np.zeros(num_rows, dtype=np.bool_)
    # Where each row stands in the heap.
    where = np.empty(num_rows, dtype=np.int64)
    for place in range(num_rows):
        where[heap[place]] = place
    looks = 0
    for done in range(order.size):
        item = order[done]
        must_open = order.size - done <= empty
        row = -1
        if not must_open:
            row = _near_top(sizes[item], heap, missing, free, used, capacity)
        if row < 0:
            row = _emptiest(sizes[item], free, used, capacity, must_open)
            looks += num_rows
        if row < 0 or looks > _MAX_LOOKS:
            return False
        row_of[item] = row
        if not used[row]:
            used[row] = True
            empty -= 1
        free[row] = free[row] - sizes[item] if sizes[item] <= capacity else 0
        missing[row] -= work[item]
        _sift_down(heap, where, missing, where[row])
    return True


@kernel
def _near_top(
    size: int, heap: Ints, missing: Floats, free: Ints, used: Bools, capacity: int
) -> int:
    """The row with most missing among the heap's top that has room; -1 for none."""
    best = -1
    for place in range(min(_LOOK, heap.size)):
        row = heap[place]
        fits = free[row] >= size if size <= capacity else not used[row]
        if fits and (best < 0 or missing[row] > missing[best]):
            best = row
    return best


@kernel
def _emptiest(size: int, free: Ints, used: Bools, capacity: int, must_open: bool) -> int:
    """The row with most room, a new one where that is asked for; -1 for none."""
    best = -1
    for row in range(free.size):
        fits = not used[row] if must_open or size > capacity else free[row] >= size
        if fits and (best < 0 or free[row] > free[best]):
            best = row
    return best


@kernel
def _sift_down(heap: Ints, where: Ints, key: Floats, place: int) -> None:
    row = heap[place]
    while True:
        child = 2 * place + 1
        if child >= heap.size:
            break
        if child + 1 < heap.size and key[heap[child + 1]] > key[heap[child]]:
            child += 1
        if key[heap[child]] <= key[row]:
            break
        heap[place] = heap[child]
        where[heap[place]] = place
        place = child
    heap[place] = row
    where[row] = place
