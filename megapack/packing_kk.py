"""Karmarkar-Karp: k sums as even as the largest differencing method makes them.

Karmarkar and Karp 1982, multi-way as in Korf 2009: every item begins as a tuple of k sets, one of
them filled; the two tuples of largest spread are merged, the largest set of one with the smallest
of the other, until one is left. Ties are broken as other frameworks' packers break them, by sum,
then number of items, then the items themselves, so that this can stand in for theirs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megapack.errors import PlanError
from megapack.inputs import Ints
from megapack.jit import kernel


class _Tuples(NamedTuple):
    """Tuples of k sets, [tuples, k], a tuple's sets in falling order; items are linked lists."""

    sums: Ints
    nums: Ints
    head: Ints
    tail: Ints
    next: Ints
    """Per item the next of its set, in the order in which they joined; -1 at the end."""
    sizes: Ints


def karmarkar_karp(sizes: Ints, num_parts: int, *, equal_size: bool = False) -> list[list[int]]:
    """Partition items into `num_parts` parts of about equal sums.

    Args:
        sizes: int64 [n], at least `num_parts` items.
        equal_size: every part gets n / num_parts items.

    Returns:
        Per part its items in the order in which they joined; the part of largest sum first.

    Raises:
        PlanError: fewer items than parts, or equal parts that do not divide.
    """
    sizes = np.asarray(sizes, dtype=np.int64)
    if sizes.size < num_parts or num_parts < 1:
        raise PlanError(f"{sizes.size} items for {num_parts} parts; set at most {sizes.size} parts")
    if equal_size and sizes.size % num_parts:
        raise PlanError(
            f"{sizes.size} items do not divide into {num_parts} equal parts; set equal_size=False"
        )
    order = np.lexsort((np.arange(sizes.size), sizes))
    head, following = _largest_differencing(sizes, order, num_parts, equal_size)
    parts: list[list[int]] = []
    after = following.tolist()
    for item in head.tolist():
        part = []
        at = item
        while at >= 0:
            part.append(at)
            at = after[at]
        parts.append(part)
    return parts


@kernel
def _largest_differencing(sizes: Ints, order: Ints, k: int, equal_size: bool) -> tuple[Ints, Ints]:
    step = k if equal_size else 1
    count = sizes.size // step
    sets = _Tuples(
        np.zeros((count, k), dtype=np.int64),
        np.zeros((count, k), dtype=np.int64),
        np.full((count, k), -1, dtype=np.int64),
        np.full((count, k), -1, dtype=np.int64),
        np.full(sizes.size, -1, dtype=np.int64),
        sizes,
    )
    heap = np.empty(count, dtype=np.int64)
    for t in range(count):
        for i in range(step):
            item = order[t * step + i]
            sets.sums[t, i] = sizes[item]
            sets.nums[t, i] = 1
            sets.head[t, i] = item
            sets.tail[t, i] = item
        _sort_sets(sets, t)
        heap[t] = t
        _sift_up(sets, heap, t)
    for left in range(count - 1, 0, -1):
        first = _pop(sets, heap, left + 1)
        second = heap[0]
        _merge(sets, first, second)
        _sort_sets(sets, first)
        heap[0] = first
        _sift_down(sets, heap, 0, left)
    return sets.head[heap[0]], sets.next


@kernel
def _merge(sets: _Tuples, into: int, other: int) -> None:
    """The largest sets of one with the smallest of the other; items keep their order."""
    k = sets.sums.shape[1]
    for i in range(k):
        j = k - 1 - i
        if sets.nums[other, j] == 0:
            continue
        if sets.nums[into, i] == 0:
            sets.head[into, i] = sets.head[other, j]
        else:
            sets.next[sets.tail[into, i]] = sets.head[other, j]
        sets.tail[into, i] = sets.tail[other, j]
        sets.sums[into, i] += sets.sums[other, j]
        sets.nums[into, i] += sets.nums[other, j]


@kernel
def _compare(sets: _Tuples, a: int, i: int, b: int, j: int) -> int:
    """Set i of tuple a against set j of tuple b: by sum, number, then (item, size) pairs."""
    if sets.sums[a, i] != sets.sums[b, j]:
        return 1 if sets.sums[a, i] > sets.sums[b, j] else -1
    if sets.nums[a, i] != sets.nums[b, j]:
        return 1 if sets.nums[a, i] > sets.nums[b, j] else -1
    x = sets.head[a, i]
    y = sets.head[b, j]
    for _ in range(sets.nums[a, i]):
        if x != y:
            return 1 if x > y else -1
        x = sets.next[x]
        y = sets.next[y]
    return 0


@kernel
def _sort_sets(sets: _Tuples, t: int) -> None:
    """Falling order, by insertion: merged tuples are nearly sorted."""
    for i in range(1, sets.sums.shape[1]):
        j = i
        while j > 0 and _compare(sets, t, j, t, j - 1) > 0:
            _swap(sets.sums, t, j)
            _swap(sets.nums, t, j)
            _swap(sets.head, t, j)
            _swap(sets.tail, t, j)
            j -= 1


@kernel
def _swap(values: Ints, t: int, j: int) -> None:
    kept = values[t, j]
    values[t, j] = values[t, j - 1]
    values[t, j - 1] = kept


@kernel
def _before(sets: _Tuples, a: int, b: int) -> bool:
    """Whether tuple a leaves the heap before b: larger spread, then larger first set."""
    last = sets.sums.shape[1] - 1
    spread_a = sets.sums[a, 0] - sets.sums[a, last]
    spread_b = sets.sums[b, 0] - sets.sums[b, last]
    if spread_a != spread_b:
        return bool(spread_a > spread_b)
    return bool(_compare(sets, a, 0, b, 0) > 0)


@kernel
def _pop(sets: _Tuples, heap: Ints, size: int) -> int:
    top = heap[0]
    heap[0] = heap[size - 1]
    _sift_down(sets, heap, 0, size - 1)
    return int(top)


@kernel
def _sift_up(sets: _Tuples, heap: Ints, place: int) -> None:
    t = heap[place]
    while place > 0 and _before(sets, t, heap[(place - 1) // 2]):
        heap[place] = heap[(place - 1) // 2]
        place = (place - 1) // 2
    heap[place] = t


@kernel
def _sift_down(sets: _Tuples, heap: Ints, place: int, size: int) -> None:
    t = heap[place]
    while 2 * place + 1 < size:
        child = 2 * place + 1
        if child + 1 < size and _before(sets, heap[child + 1], heap[child]):
            child += 1
        if not _before(sets, heap[child], t):
            break
        heap[place] = heap[child]
        place = child
    heap[place] = t
