"""Bins of a fixed capacity: first-fit-decreasing and the lower bound it is held against.

Sizes are padded tokens. A size above the capacity is alone in its bin.
"""

from __future__ import annotations

import numpy as np

from megapack.inputs import Ints
from megapack.jit import kernel


def first_fit_decreasing(sizes: Ints, capacity: int) -> tuple[Ints, int]:
    """First-fit-decreasing (Johnson 1973) over a segment tree of free space: O(n log n).

    Args:
        sizes: int64 [n], tokens per item.
        capacity: tokens per bin.

    Returns:
        bin_of: int64 [n], numbered in order of opening.
        num_bins: how many were opened.
    """
    order = np.argsort(-sizes, kind="stable")
    bin_of, num_bins = _first_fit(sizes, order, capacity)
    return bin_of, int(num_bins)


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
