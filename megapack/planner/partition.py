"""Parts of equal sums (Karmarkar-Karp), the rows of each rank, and their order.

Karmarkar and Karp 1982, multi-way as in Korf 2009. Every item starts as a tuple of k sets, one of
which holds it. The two tuples of largest spread (largest sum minus smallest) are merged, the
largest set of one with the smallest set of the other, until one tuple is left. With k=2, the items
8, 7, 6 become (8 | 7), with spread 1, and then (6, 7 | 8).

Ties are broken by sum, then by number of items, then by the items themselves. Other frameworks'
packers break them the same way, so this can replace theirs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megapack.base.arrays import Floats, Ints
from megapack.base.jit import kernel
from megapack.errors import PlanError
from megapack.planner.bins import pack_to_targets
from megapack.planner.draft import PADDING

# Limit on rows or items for Karmarkar-Karp, which keeps a tuple of sets per item in memory. 4,096
# items on 64 ranks are 4,096 tuples of 64 sets, and their four int64 arrays take 8 MiB. Chosen by
# hand.
_MAX_DIFFERENCED = 4096
# Karmarkar-Karp gets work as integers. The largest becomes 2**40: rounding changes work by less
# than 1e-12 of the largest, and the sum of 2**22 items still fits into int64.
_LARGEST_UNITS = 2**40


def karmarkar_karp(sizes: Ints, num_parts: int, *, equal_size: bool = False) -> list[list[int]]:
    """Partition items into `num_parts` parts of about equal sums.

    Args:
        sizes: int64 [n], at least `num_parts` items.
        equal_size: every part gets n / num_parts items.

    Returns:
        The items of each part, in the order in which they joined; the part with the largest
        sum first.

    Raises:
        PlanError: fewer items than parts, or n is not a multiple of `num_parts` under `equal_size`.
    """
    sizes = np.asarray(sizes, dtype=np.int64)
    if sizes.size < num_parts or num_parts < 1:
        raise PlanError(f"{sizes.size} items for {num_parts} parts; set at most {sizes.size} parts")
    if equal_size and sizes.size % num_parts:
        raise PlanError(
            f"{sizes.size} items do not divide into {num_parts} equal parts; set equal_size=False"
        )
    order = np.lexsort((np.arange(sizes.size), sizes))
    heads, following = _largest_differencing(sizes, order, num_parts, equal_size)
    next_of = following.tolist()
    parts: list[list[int]] = []
    for head in heads.tolist():
        part = []
        item = head
        while item >= 0:
            part.append(item)
            item = next_of[item]
        parts.append(part)
    return parts


def rows_to_ranks(row_work: Floats, num_ranks: int, *, in_rounds: bool = False) -> list[Ints]:
    """Distribute rows over ranks of about equal work.

    Karmarkar-Karp if all ranks get equally many rows; otherwise heaviest row first, to the rank of
    least work that has room. The ranks' numbers of rows differ by at most one, so that no rank has
    only padding while another has two rows.

    Args:
        row_work: float64 [R].
        in_rounds: sort rows by work and give each rank one of every dp rows, so that the k-th rows
            of all ranks have similar work. For ranks that synchronize in every micro-batch.

    Returns:
        The rows of each rank, heaviest first.
    """
    order = np.argsort(-row_work, kind="stable")
    each, more = divmod(row_work.size, num_ranks)
    if not in_rounds and row_work.size <= _MAX_DIFFERENCED and more == 0:
        return _differenced(row_work, order, num_ranks)
    quota = each + (np.arange(num_ranks) < more).astype(np.int64)
    rank_of = _to_lightest_rank(row_work, order, quota, num_ranks if in_rounds else 0)
    by_rank = order[np.argsort(rank_of[order], kind="stable")]
    return np.split(by_rank, np.cumsum(quota)[:-1])


def rows_by_rank(
    sizes: Ints, work: Floats, num_ranks: int, count: int, capacity: int
) -> Ints | None:
    """Distribute items over ranks of about equal work, then pack each rank's items into rows.

    Args:
        sizes: int64 [n], padded tokens.
        work: float64 [n].
        count: rows of each rank.
        capacity: tokens per row.

    Returns:
        row_of: int64 [n], the rows of rank r numbered from r * count. None if the items do not fit,
        or are too few for the rows or too many for Karmarkar-Karp.
    """
    if not num_ranks <= sizes.size <= _MAX_DIFFERENCED:
        return None
    row_of = np.empty(sizes.size, dtype=np.int64)
    for rank, part in enumerate(karmarkar_karp(_units(work), num_ranks, equal_size=False)):
        items = np.array(part, dtype=np.int64)
        targets = np.full(count, float(np.cumsum(work[items])[-1]) / count)
        rows = pack_to_targets(sizes[items], work[items], targets, capacity)
        if rows is None or items.size < count:
            return None
        row_of[items] = rank * count + rows
    return row_of


def order_by_target(rows: Ints, targets: Floats) -> Ints:
    """A rank's rows in pipeline order: the heaviest row where the target is largest.

    Equal targets are filled from the middle outwards, so that the lightest rows are first and last.
    Rows 10, 11, 12 with targets 1, 3, 2, 0.5 give 12, 10, 11, PADDING.

    Args:
        rows: int64 [..., at most M], heaviest first. The smallest targets get PADDING if there are
            fewer rows.
        targets: float64 [..., M].

    Returns:
        int64 [..., M].
    """
    count = targets.shape[-1]
    position = np.arange(count)
    from_end = np.minimum(position, count - 1 - position)
    from_end = np.broadcast_to(from_end, targets.shape)
    # Stable, so that of equal targets as far from the ends the first comes first.
    order = np.lexsort((-from_end, -targets))
    out = np.full(targets.shape, PADDING, dtype=np.int64)
    np.put_along_axis(out, order[..., : rows.shape[-1]], rows, axis=-1)
    return out


def _differenced(row_work: Floats, order: Ints, num_ranks: int) -> list[Ints]:
    """Equally many rows per rank, by Karmarkar-Karp: sums are closer than with heaviest-first."""
    rank_of = np.empty(row_work.size, dtype=np.int64)
    for rank, rows in enumerate(karmarkar_karp(_units(row_work), num_ranks, equal_size=True)):
        rank_of[rows] = rank
    return [order[rank_of[order] == rank] for rank in range(num_ranks)]


def _units(work: Floats) -> Ints:
    """Work scaled to integers: a sum of floats would depend on the order of its terms."""
    largest = float(work.max())
    # With all coefficients 0, a cost model gives work of 0.
    scaled = work / largest if largest > 0 else np.zeros(work.size)
    return np.round(scaled * _LARGEST_UNITS).astype(np.int64)


@kernel
def lightest_ranks(work: Floats, num_ranks: int) -> Ints:
    """Rank of each item, int64 [n]: items in order, each to the rank with the least work so far.

    Of several such ranks, the first one gets it.
    """
    rank_of = np.empty(work.size, dtype=np.int64)
    load = np.zeros(num_ranks)
    # A min-heap of ranks by load, then by number.
    heap = np.arange(num_ranks)
    for item in range(work.size):
        rank = heap[0]
        rank_of[item] = rank
        load[rank] += work[item]
        node = 0
        while 2 * node + 1 < num_ranks:
            child = 2 * node + 1
            if child + 1 < num_ranks and (load[heap[child + 1]], heap[child + 1]) < (
                load[heap[child]],
                heap[child],
            ):
                child += 1
            if (load[rank], rank) < (load[heap[child]], heap[child]):
                break
            heap[node] = heap[child]
            node = child
        heap[node] = rank
    return rank_of


@kernel
def _to_lightest_rank(row_work: Floats, order: Ints, quota: Ints, round_size: int) -> Ints:
    """Rank of each row: rows in `order`, each to the least loaded rank below its quota.

    Args:
        round_size: rows of a round, in which a rank gets at most one row; 0 without rounds.
    """
    num_ranks = quota.size
    rank_of = np.empty(order.size, dtype=np.int64)
    load = np.zeros(num_ranks)
    taken = np.zeros(num_ranks, dtype=np.int64)
    for position in range(order.size):
        row = order[position]
        best = -1
        for rank in range(num_ranks):
            if taken[rank] >= quota[rank]:
                continue
            if round_size > 0 and taken[rank] > position // round_size:
                continue
            if best < 0 or (load[rank], taken[rank]) < (load[best], taken[best]):
                best = rank
        rank_of[row] = best
        load[best] += row_work[row]
        taken[best] += 1
    return rank_of


class _Tuples(NamedTuple):
    """T tuples of k sets each, in descending order. The items of a set are a linked list."""

    sums: Ints
    """[T, k]: sum of each set."""
    nums: Ints
    """[T, k]: number of items of each set."""
    head: Ints
    """[T, k]: first item of each set."""
    tail: Ints
    """[T, k]: last item of each set."""
    next: Ints
    """[n]: the next item of the same set, in the order in which they joined; -1 at the end."""


@kernel
def _largest_differencing(sizes: Ints, order: Ints, k: int, equal_size: bool) -> tuple[Ints, Ints]:
    """Merge tuples until one is left.

    Args:
        order: items by rising size. Under `equal_size` each k of them start as one tuple.

    Returns:
        heads: int64 [k], the first item of each part.
        next: int64 [n], the item after each item in its part.
    """
    step = k if equal_size else 1
    count = sizes.size // step
    sets = _Tuples(
        np.zeros((count, k), dtype=np.int64),
        np.zeros((count, k), dtype=np.int64),
        np.full((count, k), -1, dtype=np.int64),
        np.full((count, k), -1, dtype=np.int64),
        np.full(sizes.size, -1, dtype=np.int64),
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
    """Merge the largest sets of a tuple with the smallest of another; items keep their order."""
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
    """Whether set i of tuple a is larger (1), equal (0) or smaller (-1) than set j of tuple b.

    The first difference decides, in the sums, the numbers of items, or the items.
    """
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
    """Sort a tuple's sets in descending order, by insertion, as merged tuples are nearly sorted."""
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
    """Exchange the values of sets j and j - 1 of a tuple."""
    kept = values[t, j]
    values[t, j] = values[t, j - 1]
    values[t, j - 1] = kept


@kernel
def _before(sets: _Tuples, a: int, b: int) -> bool:
    """Whether tuple a leaves the heap before b: by larger spread, then by larger first set."""
    last = sets.sums.shape[1] - 1
    spread_a = sets.sums[a, 0] - sets.sums[a, last]
    spread_b = sets.sums[b, 0] - sets.sums[b, last]
    if spread_a != spread_b:
        return bool(spread_a > spread_b)
    return bool(_compare(sets, a, 0, b, 0) > 0)


@kernel
def _pop(sets: _Tuples, heap: Ints, size: int) -> int:
    """Pop the tuple with the largest spread from a heap of `size` tuples."""
    top = heap[0]
    heap[0] = heap[size - 1]
    _sift_down(sets, heap, 0, size - 1)
    return int(top)


@kernel
def _sift_up(sets: _Tuples, heap: Ints, node: int) -> None:
    """Sift the tuple at a heap node up."""
    t = heap[node]
    while node > 0 and _before(sets, t, heap[(node - 1) // 2]):
        heap[node] = heap[(node - 1) // 2]
        node = (node - 1) // 2
    heap[node] = t


@kernel
def _sift_down(sets: _Tuples, heap: Ints, node: int, size: int) -> None:
    """Sift the tuple at a heap node down, in a heap of `size` tuples."""
    t = heap[node]
    while 2 * node + 1 < size:
        child = 2 * node + 1
        if child + 1 < size and _before(sets, heap[child + 1], heap[child]):
            child += 1
        if not _before(sets, heap[child], t):
            break
        heap[node] = heap[child]
        node = child
    heap[node] = t
