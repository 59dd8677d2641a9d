"""Packing to target sizes: the capped least-loaded rule, with a size of its own for each row.

Longest-processing-time-first (Graham 1969) by cost, the token budget a hard cap beside it: the
heaviest sample goes where most of the target is still missing, among the rows with room for it.
"""

from __future__ import annotations

import numpy as np

from megapack.inputs import Bools, Floats, Ints
from megapack.jit import kernel

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
