"""Parts of equal sums (Karmarkar-Karp), as other frameworks' packers make them.

Karmarkar and Karp 1982, multi-way as in Korf 2009. Every item starts as a tuple of k sets, one of
which holds it. The two tuples of largest spread (largest sum minus smallest) are merged, the
largest set of one with the smallest set of the other, until one tuple is left. With k=2, the items
8, 7, 6 become (8 | 7), with spread 1, and then (6, 7 | 8).

Ties are broken by sum, then by number of items, then by the items themselves. Other frameworks'
packers break them the same way, so this can replace theirs.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from megapack.base.arrays import Ints
from megapack.errors import PlanError

_Set = tuple[int, int, tuple[int, ...]]
"""Sum, number of items, and the items in the order in which they joined."""


class _Tuple(NamedTuple):
    sets: list[_Set]
    """The largest first."""

    def __lt__(self, other: object) -> bool:
        """Whether it leaves the heap before another one: by spread, then by its largest set."""
        assert isinstance(other, _Tuple)
        spread, others = (own.sets[0][0] - own.sets[-1][0] for own in (self, other))
        return spread > others if spread != others else self.sets[0] > other.sets[0]


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
    weights = np.asarray(sizes, dtype=np.int64).tolist()
    size = len(weights)
    if size < num_parts or num_parts < 1:
        raise PlanError(f"{size} items for {num_parts} parts; set at most {size} parts")
    if equal_size and size % num_parts:
        raise PlanError(
            f"{size} items do not divide into {num_parts} equal parts; set equal_size=False"
        )
    order = sorted(range(size), key=lambda item: (weights[item], item))
    each = num_parts if equal_size else 1
    none: _Set = (0, 0, ())
    heap = []
    for first in range(0, size, each):
        own = [(weights[item], 1, (item,)) for item in order[first : first + each]]
        heap.append(_Tuple(sorted([*own, *[none] * (num_parts - each)], reverse=True)))
    heapq.heapify(heap)
    while len(heap) > 1:
        one, other = heapq.heappop(heap), heapq.heappop(heap)
        pairs = zip(one.sets, reversed(other.sets), strict=True)
        merged = ((a + b, n + m, items + more) for (a, n, items), (b, m, more) in pairs)
        heapq.heappush(heap, _Tuple(sorted(merged, reverse=True)))
    return [list(items) for _, _, items in heap[0].sets]
