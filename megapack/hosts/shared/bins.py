"""Packs of a data set: as few as can be, of even cost; and the split of a host's own packs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megapack.base.arrays import Floats, Ints
from megapack.hosts.shared.rank_rows import Rows, rows_of, split_rows
from megapack.layout import round_up
from megapack.planner.bins import fewest_bins_bound, first_fit_decreasing, pack_to_targets

# Bins beyond the bound that evenness may cost, as a part of the bound: 7 of 1424. Chosen by hand,
# as is the number of tries.
_SLACK = 0.005
_MAX_TRIES = 8


def even_bins(sizes: Ints, work: Floats, capacity: int) -> Rows:
    """Pack items into few bins of about equal work.

    Sizes 6, 6, 4, 4 with capacity 10 become two bins of 6 and 4.

    Args:
        sizes: int64 [n], tokens of each item.
        work: float64 [n], what the bins should have equally much of.
        capacity: tokens of a bin.

    Returns:
        Bins of indices. None is empty, none has more than `capacity` tokens. The exception is an
        item that is larger by itself: it is alone in a bin, in addition to the others.
    """
    if not sizes.size:
        return []
    fitting = np.flatnonzero(sizes <= capacity)
    if len(fitting) < len(sizes):
        bins = even_bins(sizes[fitting], work[fitting], capacity)
        alone = np.flatnonzero(sizes > capacity).tolist()
        return [*([int(fitting[i]) for i in members] for members in bins), *([i] for i in alone)]
    fallback, most = first_fit_decreasing(sizes, capacity)
    fewest = max(fewest_bins_bound(sizes, capacity), 1)
    for count in _counts(fewest, most):
        bin_of = pack_to_targets(sizes, work, np.full(count, work.sum() / count), capacity)
        if bin_of is not None:
            return rows_of(bin_of, count)
    return rows_of(fallback, most)


def _counts(fewest: int, most: int) -> list[int]:
    """Numbers of bins to try, rising, from the bound to what first-fit needs or a few more."""
    more = max(most - fewest, int(fewest * _SLACK))
    num_tries = min(_MAX_TRIES, more + 1)
    return sorted({fewest + more * i // max(num_tries - 1, 1) for i in range(num_tries)})


def with_heaviest_split(packer: Any) -> Any:
    """A packer of NeMo-RL or SkyRL that makes missing bins from the heaviest ones.

    Both hosts fill a required number of bins by moving one sequence each out of the bins with the
    most sequences: one bin of 100 sequences for four ranks becomes bins of 97, 1, 1 and 1. What
    `_pack_implementation` returns in the required number, the hosts leave as it is; where there are
    too few sequences, they raise.
    """
    own = packer._pack_implementation

    def pack(sequence_lengths: Sequence[int]) -> Rows:
        bins: Rows = own(sequence_lengths)
        count = round_up(max(len(bins), packer.min_bin_count or 0), packer.bin_count_multiple or 1)
        return split_rows(bins, count, np.asarray(sequence_lengths, dtype=np.int64))

    # In the instance's own attributes, which hide the method of its class.
    packer._pack_implementation = pack
    return packer
