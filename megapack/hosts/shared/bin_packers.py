"""Packers that NeMo-RL and SkyRL know by name: lengths -> bins of indices, none of them empty.

A packer's rule decides the bins, ties included; where more bins are asked for than it made, the
heaviest are split. All are deterministic.
"""

from __future__ import annotations

import bisect
import enum
import heapq
from collections.abc import Callable, Sequence

import numpy as np

from megapack.base.arrays import Ints
from megapack.errors import ConfigError, PlanError
from megapack.hosts.shared.rank_rows import Rows, split_rows
from megapack.layout import round_up
from megapack.planner.bins import first_fit

Rule = Callable[[Ints, int], Rows]
"""Lengths, int64 [n], and a capacity -> bins in order of opening."""


class SequencePacker:
    """Packs sequences into bins of a capacity, as many of them as the counts ask for."""

    def __init__(
        self,
        rule: Rule,
        bin_capacity: int,
        min_bin_count: int | None = None,
        bin_count_multiple: int | None = None,
        *,
        oversize_alone: bool = False,
    ) -> None:
        """
        Args:
            bin_capacity: tokens of a bin.
            min_bin_count: at least so many bins.
            bin_count_multiple: a multiple of it.
            oversize_alone: a sequence over the capacity has a bin of its own; else it is refused.

        Raises:
            ConfigError: a capacity or counts out of range.
        """
        if bin_capacity < 1:
            raise ConfigError(f"bin_capacity={bin_capacity} must be positive")
        if min_bin_count is not None and min_bin_count < 0:
            raise ConfigError(f"min_bin_count={min_bin_count} must be nonnegative")
        if bin_count_multiple is not None and bin_count_multiple < 1:
            raise ConfigError(f"bin_count_multiple={bin_count_multiple} must be positive")
        self.bin_capacity = bin_capacity
        self.min_bin_count = min_bin_count
        self.bin_count_multiple = bin_count_multiple
        self._rule = rule
        self._oversize_alone = oversize_alone

    def pack(self, sequence_lengths: Sequence[int]) -> Rows:
        """Bins of indices into `sequence_lengths`.

        Raises:
            PlanError: a sequence over the capacity, or more bins asked for than sequences.
        """
        lengths = np.array([int(length) for length in sequence_lengths], dtype=np.int64)
        if lengths.size and lengths.min() < 1:
            raise PlanError(f"a sequence length is {lengths.min()}; lengths must be positive")
        if lengths.size and lengths.max() > self.bin_capacity and not self._oversize_alone:
            raise PlanError(
                f"Sequence length {lengths.max()} exceeds bin capacity {self.bin_capacity}; raise "
                "it or leave the sequence out"
            )
        bins = self._rule(lengths, self.bin_capacity) if lengths.size else []
        wanted = self._wanted(len(bins))
        if wanted > lengths.size:
            raise PlanError(
                f"Cannot create {wanted} bins with only {lengths.size} sequences; set a smaller "
                "min_bin_count or bin_count_multiple, or give more sequences"
            )
        return split_rows(bins, wanted, lengths)

    def _wanted(self, count: int) -> int:
        multiple = self.bin_count_multiple or 1
        return round_up(max(count, self.min_bin_count or 0), multiple)


def choose(name: enum.Enum | str, rules: dict[str, Rule]) -> tuple[str, Rule]:
    """A rule by name in any case, or by the host's enum member of that name.

    Raises:
        ConfigError: no such rule.
    """
    key = name.name if isinstance(name, enum.Enum) else name
    found = rules.get(key.upper()) if isinstance(key, str) else None
    if found is None:
        raise ConfigError(f"Unknown packing algorithm: {name}; set one of {', '.join(rules)}")
    return key.upper(), found


def next_fit(lengths: Ints, capacity: int) -> Rows:
    """In input order, a new bin where the last one has no room."""
    bins: Rows = []
    free = 0
    for i, size in enumerate(lengths.tolist()):
        if size > free:
            bins.append([])
            free = capacity
        bins[-1].append(i)
        free -= size
    return bins


def first_fit_decreasing(lengths: Ints, capacity: int) -> Rows:
    """Longest first into the first bin with room; of equal ones the later first."""
    return first_fit_in_order(lengths, capacity, np.argsort(lengths, kind="stable")[::-1])


def first_fit_shuffle(lengths: Ints, capacity: int) -> Rows:
    """In an order that looks random and is the same for the same number of sequences."""
    # Raw bits of a bit generator: NumPy keeps these streams, not those of `permutation`.
    keys = np.random.PCG64(lengths.size).random_raw(lengths.size)
    return first_fit_in_order(lengths, capacity, np.argsort(keys, kind="stable"))


def first_fit_in_order(lengths: Ints, capacity: int, order: Ints) -> Rows:
    """Each sequence of `order` into the first bin with room; bins keep that order."""
    bin_of, num_bins = first_fit(lengths[order], capacity)
    bins: Rows = [[] for _ in range(num_bins)]
    for i, number in zip(order.tolist(), bin_of.tolist(), strict=True):
        bins[number].append(i)
    return bins


def least_loaded(lengths: Ints, capacity: int) -> Rows:
    """Longest first into the emptiest bin, a new one where it has no room."""
    bins: Rows = []
    heap: list[tuple[int, int]] = []
    for i in np.argsort(-lengths, kind="stable").tolist():
        size = int(lengths[i])
        if heap and heap[0][0] + size <= capacity:
            load, number = heap[0]
            heapq.heapreplace(heap, (load + size, number))
            bins[number].append(i)
        else:
            heapq.heappush(heap, (size, len(bins)))
            bins.append([i])
    return bins


def modified_first_fit_decreasing(lengths: Ints, capacity: int) -> Rows:
    """Johnson and Garey 1985: at most 71/60 of the fewest bins and one more.

    Lengths over half the capacity open a bin each. From the first, each takes the longest medium
    one (over a third) that fits; from the last, those without one take the shortest small one (over
    a sixth) and the longest that fits beside it; from the first, each takes what fits of the rest,
    longest first. What is left goes into as few bins as first-fit-decreasing needs, or the emptiest
    bin first where these are fewer.
    """
    size = lengths.tolist()
    falling = np.argsort(-lengths, kind="stable").tolist()
    bins = [[i] for i in falling if 2 * size[i] > capacity]
    free = [capacity - size[row[0]] for row in bins]
    medium = [i for i in falling if capacity < 3 * size[i] and 2 * size[i] <= capacity]
    small = [i for i in falling if capacity < 6 * size[i] and 3 * size[i] <= capacity]
    tiny = [i for i in falling if 6 * size[i] <= capacity]

    def take_longest(number: int, items: list[int]) -> bool:
        """Move the longest of falling items that fits into a bin."""
        at = bisect.bisect_left(items, -free[number], key=lambda i: -size[i])
        if at == len(items):
            return False
        bins[number].append(items.pop(at))
        free[number] -= size[bins[number][-1]]
        return True

    without = [number for number in range(len(bins)) if not take_longest(number, medium)]
    for number in reversed(without):
        if len(small) > 1 and size[small[-1]] + size[small[-2]] <= free[number]:
            take_longest(number, [small.pop()])
            take_longest(number, small)
    rest = sorted([*medium, *small, *tiny], key=lambda i: -size[i])
    for number in range(len(bins)):
        while take_longest(number, rest):
            pass
    if not rest:
        return bins
    packings = [rule(lengths[rest], capacity) for rule in (first_fit_decreasing, least_loaded)]
    return bins + [[rest[i] for i in row] for row in min(packings, key=len)]
