"""Sums as equal as possible (Karmarkar-Karp), and with them rows to ranks and the order of a rank.

Karmarkar and Karp 1982, multi-way as in Korf 2009: every item begins as a tuple of k sets, one of
them filled; the two tuples of largest spread are merged, the largest set of one with the smallest
of the other, until one is left. Ties are broken as other frameworks' packers break them: by sum,
then number of items, then the items themselves. So this can replace theirs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megapack.base.arrays import Floats, Ints
from megapack.base.jit import kernel
from megapack.errors import PlanError
from megapack.planner.bins import pack_to_targets
from megapack.planner.problem import PADDING


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


# More rows or samples are dealt: differencing keeps a tuple of all ranks per rows / ranks.
_MAX_DIFFERENCED = 4096


def deal(row_work: Floats, counts: Ints, *, in_rounds: bool = False) -> list[Ints]:
    """Rows to ranks of about equal work.

    Karmarkar-Karp where ranks get equally many, else the heaviest row first to the rank of least
    work that has room.

    With fewer rows than places, ranks get shares of real rows that differ by one at most, so that
    no rank has only padding while another has two rows.

    Args:
        row_work: float64 [R].
        counts: int64 [dp], places of each rank; at least R in all.
        in_rounds: every rank takes one row of each dp that follow each other by weight, so that
            the k-th rows of all ranks are alike: for ranks that meet at every micro-batch.

    Returns:
        Per rank its rows, heaviest first.
    """
    order = np.argsort(-row_work, kind="stable")
    quota = _quotas(counts, row_work.size)
    if not in_rounds and row_work.size <= _MAX_DIFFERENCED and np.all(quota == quota[0]):
        return _differenced(row_work, order, counts.size)
    rank_of = _deal(row_work, order, quota, counts.size if in_rounds else 0)
    by_rank = order[np.argsort(rank_of[order], kind="stable")]
    return np.split(by_rank, np.cumsum(quota)[:-1])


def _differenced(row_work: Floats, order: Ints, num_ranks: int) -> list[Ints]:
    """Karmarkar-Karp with equally many rows for each rank: sums are nearer than by dealing."""
    rank_of = np.empty(row_work.size, dtype=np.int64)
    for rank, rows in enumerate(karmarkar_karp(_units(row_work), num_ranks, equal_size=True)):
        rank_of[rows] = rank
    return [order[rank_of[order] == rank] for rank in range(num_ranks)]


def deal_samples(
    sizes: Ints, work: Floats, num_ranks: int, count: int, capacity: int
) -> Ints | None:
    """Samples to ranks of about equal work by Karmarkar-Karp, then each rank's into rows.

    Args:
        sizes: int64 [n], padded tokens.
        work: float64 [n].
        count: rows of each rank.
        capacity: tokens per row.

    Returns:
        row_of: int64 [n], rank r has the rows from r * count on; None where they do not fit or are
        too few or too many to be differenced.
    """
    if not num_ranks <= sizes.size <= _MAX_DIFFERENCED:
        return None
    row_of = np.empty(sizes.size, dtype=np.int64)
    for rank, part in enumerate(karmarkar_karp(_units(work), num_ranks, equal_size=False)):
        samples = np.array(part, dtype=np.int64)
        targets = np.full(count, float(np.cumsum(work[samples])[-1]) / count)
        rows = pack_to_targets(sizes[samples], work[samples], targets, capacity)
        if rows is None or samples.size < count:
            return None
        row_of[samples] = rank * count + rows
    return row_of


def _units(work: Floats) -> Ints:
    """Whole numbers in proportion to work: sums of floats would depend on their order."""
    largest = float(work.max())
    # A cost model of zeros weighs nothing.
    scaled = work / largest if largest > 0 else np.zeros(work.size)
    return np.round(scaled * 2**40).astype(np.int64)


def _quotas(counts: Ints, num_rows: int) -> Ints:
    """Real rows per rank: its places, or where rows run out an equal share of them."""
    quota = counts.copy()
    missing = int(counts.sum()) - num_rows
    while missing > 0:
        # Take from the ranks that have most, the last ones first.
        most = int(quota.max())
        top = np.flatnonzero(quota == most)
        below = quota[quota < most]
        step = most - int(below.max()) if below.size else most
        whole = min(step, missing // top.size)
        if whole == 0:
            quota[top[top.size - missing :]] -= 1
            break
        quota[top] -= whole
        missing -= whole * top.size
    return quota


@kernel
def _deal(row_work: Floats, order: Ints, quota: Ints, round_size: int) -> Ints:
    num_ranks = quota.size
    rank_of = np.empty(order.size, dtype=np.int64)
    load = np.zeros(num_ranks)
    taken = np.zeros(num_ranks, dtype=np.int64)
    for place in range(order.size):
        best = -1
        for rank in range(num_ranks):
            if taken[rank] >= quota[rank]:
                continue
            if round_size > 0 and taken[rank] > place // round_size:
                continue
            if best < 0 or (load[rank], taken[rank]) < (load[best], taken[best]):
                best = rank
        rank_of[order[place]] = best
        load[best] += row_work[order[place]]
        taken[best] += 1
    return rank_of


def place_by_target(rows: Ints, targets: Floats) -> Ints:
    """A rank's rows in pipeline order: the heaviest where the target is largest.

    Places of equal target fill from the middle, so that what is small stands first and last.

    Args:
        rows: heaviest first; fewer than places leave PADDING at the smallest targets.
        targets: float64 [M].

    Returns:
        int64 [M].
    """
    count = targets.size
    place = np.arange(count)
    from_end = np.minimum(place, count - 1 - place)
    order = np.lexsort((place, -from_end, -targets))
    out = np.full(count, PADDING, dtype=np.int64)
    out[order[: rows.size]] = rows
    return out
