"""What several hosts pack with: partitions of even sums, bins under a budget."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megapack.base.arrays import Ints
from megapack.errors import HostAssertionError
from megapack.planner.bins import first_fit_decreasing
from megapack.planner.partition import karmarkar_karp

# Sums of weights stay exact in int64, which holds 63 bits and a sign.
_MAX_TOTAL_BITS = 62


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[float], k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """Partition items so that the sums are about equal, by the largest differencing method.

    Args:
        seqlen_list: tokens or FLOPs per item, not negative.
        k_partitions: number of partitions, at most one per item.
        equal_size: every partition gets the same number of items.

    Returns:
        The items of each partition, ascending. No partition is empty; the one with the largest sum
        comes first.

    Raises:
        HostAssertionError: fewer items than partitions, or equal sizes that do not divide.
    """
    num_items = len(seqlen_list)
    if k_partitions < 1 or num_items < k_partitions:
        raise HostAssertionError(
            f"number of items: {num_items} items for k_partitions={k_partitions}; give at least "
            "one item per partition"
        )
    if equal_size and num_items % k_partitions:
        raise HostAssertionError(
            f"{num_items} items % k_partitions={k_partitions} != 0; set equal_size=False"
        )
    parts = karmarkar_karp(exact_weights(seqlen_list), k_partitions, equal_size=equal_size)
    return [sorted(part) for part in parts]


def exact_weights(values: Sequence[float]) -> Ints:
    """Weights as int64 whose sum does not overflow.

    Whole numbers stay as they are while their sum fits; others are scaled to 62 bits in total.
    """
    total = sum(values)
    if total < 2**_MAX_TOTAL_BITS and all(value == int(value) for value in values):
        return np.array([int(value) for value in values], dtype=np.int64)
    # A power of two keeps equal values equal and keeps their order.
    scale = 2.0 ** (_MAX_TOTAL_BITS - 1 - int(total).bit_length())
    return np.array([int(value * scale) for value in values], dtype=np.int64)


def first_fit_decreasing_pack(
    total_lengths: Sequence[int], max_tokens_per_bin: int
) -> list[list[int]]:
    """Put samples, from long to short, each into the first bin with room.

    Returns:
        Bins of indices, in order of opening; a sample over the budget is alone in its bin.
    """
    lengths = np.asarray(total_lengths, dtype=np.int64)
    bin_of, num_bins = first_fit_decreasing(lengths, max_tokens_per_bin)
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    for item in np.argsort(-lengths, kind="stable").tolist():
        bins[bin_of[item]].append(item)
    return bins
