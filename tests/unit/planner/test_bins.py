from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from megapack.planner.bins import (
    fewest_bins_bound,
    first_fit,
    first_fit_decreasing,
    pack_to_targets,
)

pytestmark = pytest.mark.unit


def naive(sizes: list[int], capacity: int, order: list[int]) -> list[int]:
    loads: list[int] = []
    bin_of = [0] * len(sizes)
    for i in order:
        fitting = [b for b, load in enumerate(loads) if load + sizes[i] <= capacity]
        if not fitting:
            loads.append(0)
        bin_of[i] = fitting[0] if fitting else len(loads) - 1
        loads[bin_of[i]] += sizes[i]
    return bin_of


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("pack", "falling"), [(first_fit, False), (first_fit_decreasing, True)])
def test_first_fit_equals_the_naive_version(
    seed: int, pack: Callable[..., tuple[np.ndarray, int]], falling: bool
) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, [130, 40, 101][seed % 3], 200)
    order = list(range(200))
    if falling:
        order.sort(key=lambda i: (-sizes[i], i))
    bin_of, num_bins = pack(sizes, 100)
    assert bin_of.tolist() == naive(sizes.tolist(), 100, order)
    assert num_bins == bin_of.max() + 1


def fewest_bins(sizes: list[int], capacity: int) -> int:
    for count in range(1, len(sizes) + 1):
        for bin_of in itertools.product(range(count), repeat=len(sizes)):
            loads = [0] * count
            for size, chosen in zip(sizes, bin_of, strict=True):
                loads[chosen] += size
            if max(loads) <= capacity:
                return count
    raise AssertionError


@pytest.mark.parametrize("seed", range(40))
def test_the_lower_bound_is_at_most_the_optimum(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 11, 6)
    bound = fewest_bins_bound(sizes, 10)
    assert -(-int(sizes.sum()) // 10) <= bound <= fewest_bins(sizes.tolist(), 10)


def test_the_lower_bound_can_exceed_that_of_the_sum() -> None:
    assert fewest_bins_bound(np.array([6, 6, 6, 6]), 10) == 4
    assert fewest_bins_bound(np.array([7, 7, 4, 4]), 10) == 3
    assert fewest_bins_bound(np.array([50, 3]), 10) == 2
    assert fewest_bins_bound(np.array([50]), 10) == 1


@pytest.mark.parametrize("seed", range(10))
def test_packing_to_targets_fills_all_rows_in_budget(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 120, 300)
    targets = rng.random(220) + 0.1
    row_of = pack_to_targets(sizes, sizes.astype(float) ** 2, targets * 1e4, 100)
    assert row_of is not None
    assert sorted(set(row_of.tolist())) == list(range(220))
    loads = np.bincount(row_of, weights=sizes)
    alone = np.bincount(row_of) == 1
    assert np.all((loads <= 100) | alone)


def test_packing_to_targets_gives_up_if_rows_are_too_few() -> None:
    assert pack_to_targets(np.full(10, 6), np.ones(10), np.ones(9), 10) is None
