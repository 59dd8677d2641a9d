"""Parts of equal sums, with the ties of other frameworks' packers."""

from __future__ import annotations

import numpy as np
import pytest

from megapack.outlook.baselines import karmarkar_karp

pytestmark = pytest.mark.unit


class _Set:
    def __init__(self) -> None:
        self.sum = 0
        self.items: list[tuple[int, int]] = []

    def key(self) -> tuple[int, int, list[tuple[int, int]]]:
        return self.sum, len(self.items), self.items


def naive_karmarkar_karp(sizes: list[int], k: int, equal_size: bool) -> list[list[int]]:
    """The textbook way: merge the two tuples with the largest spread until one is left."""
    rising = sorted((size, i) for i, size in enumerate(sizes))
    step = k if equal_size else 1
    tuples = []
    for first in range(0, len(sizes), step):
        sets = [_Set() for _ in range(k)]
        for part, (size, i) in zip(sets, rising[first : first + step], strict=False):
            part.items.append((i, size))
            part.sum += size
        tuples.append(sorted(sets, key=_Set.key, reverse=True))
    while len(tuples) > 1:
        tuples.sort(key=lambda t: (t[0].sum - t[-1].sum, t[0].key()), reverse=True)
        first_tuple = tuples.pop(0)
        second_tuple = tuples.pop(0)
        for part, other in zip(first_tuple, reversed(second_tuple), strict=True):
            part.items += other.items
            part.sum += other.sum
        tuples.append(sorted(first_tuple, key=_Set.key, reverse=True))
    return [sorted(i for i, _ in part.items) for part in tuples[0]]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("equal_size", [False, True])
def test_karmarkar_karp_breaks_ties_as_the_naive_version(seed: int, equal_size: bool) -> None:
    rng = np.random.default_rng(seed)
    k = int(rng.integers(1, 8))
    # Few distinct sizes make many ties.
    sizes = rng.integers(1, [3, 50, 5000][seed % 3], k * int(rng.integers(1, 10)))
    parts = karmarkar_karp(sizes.astype(float), k, equal_size=equal_size)
    assert parts == naive_karmarkar_karp(sizes.tolist(), k, equal_size)


def test_parts_beyond_the_items_are_empty() -> None:
    assert karmarkar_karp(np.array([2.0, 7.0]), 3) == [[1], [0], []]
    assert karmarkar_karp(np.array([]), 2) == [[], []]
