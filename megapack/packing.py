"""Bins of a fixed capacity: first-fit, and the bound that it is held against.

Sizes are padded tokens. A size above the capacity is alone in its bin.
"""

from __future__ import annotations

import numpy as np

from megapack.inputs import Ints
from megapack.jit import kernel


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
