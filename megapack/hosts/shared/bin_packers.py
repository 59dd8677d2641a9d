"""Packers that NeMo-RL and SkyRL select by name: lengths -> bins of indices, no bin empty.

A packer's rule decides the bins, ties included. If more bins are required than the rule made, the
heaviest bins are split. All packers are deterministic.
"""

from __future__ import annotations

import bisect
import enum
import functools
import heapq
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from megapack.base.arrays import Floats, Ints
from megapack.errors import ConfigError, PlanError
from megapack.hosts.shared.rank_rows import Rows, split_rows
from megapack.layout import round_up
from megapack.planner.bins import first_fit, pack_to_targets

Rule = Callable[[Ints, int], Rows]
"""Lengths, int64 [n], and a capacity -> bins in order of opening."""


class SequencePacker:
    """Packs sequences into bins of a capacity, in a number of bins that the counts allow."""

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
            rule: how sequences are packed.
            bin_capacity: tokens of a bin.
            min_bin_count: least number of bins.
            bin_count_multiple: the number of bins is a multiple of it.
            oversize_alone: put a sequence over the capacity alone into a bin, instead of refusing.

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
            PlanError: a sequence over the capacity, or fewer sequences than required bins.
        """
        lengths = np.array([int(length) for length in sequence_lengths], dtype=np.int64)
        if lengths.size and lengths.min() < 1:
            raise PlanError(f"a sequence length is {lengths.min()}; lengths must be positive")
        if lengths.size and lengths.max() > self.bin_capacity and not self._oversize_alone:
            raise PlanError(
                f"Sequence length {lengths.max()} exceeds bin capacity {self.bin_capacity}; raise "
                "it or leave the sequence out"
            )
        bins = self._pack_implementation(lengths.tolist())
        count = round_up(max(len(bins), self.min_bin_count or 0), self.bin_count_multiple or 1)
        if count > lengths.size:
            raise PlanError(
                f"Cannot create {count} bins with only {lengths.size} sequences; set a smaller "
                "min_bin_count or bin_count_multiple, or give more sequences"
            )
        return split_rows(bins, count, lengths)

    def _pack_implementation(self, sequence_lengths: Sequence[int]) -> Rows:
        """Bins in the number that the rule makes; hosts' classes have a method of this name."""
        lengths = np.asarray(sequence_lengths, dtype=np.int64)
        return self._rule(lengths, self.bin_capacity) if lengths.size else []


P = TypeVar("P", bound=SequencePacker)


def class_for_host(packer: type[P], module: str, name: str) -> type[P]:
    """`packer` as a subclass of the host's class too, which hosts' code asks for by `isinstance`.

    All methods and attributes are those of `packer`: nothing of the host's class is initialized.

    Args:
        packer: the class of the replacement.
        module: the host's module of the class, `nemo_rl.data.packing.algorithms`.
        name: the class in it, `ConcatenativePacker`.

    Returns:
        `packer` itself where the module is not loaded, or has no such class.
    """
    host_class = getattr(sys.modules.get(module), name, None)
    if not isinstance(host_class, type):
        return packer
    return cast(type[P], _joined_class(cast(Any, packer), host_class))


@functools.cache
def _joined_class(packer: Any, host_class: Any) -> Any:
    def fill(namespace: dict[str, Any]) -> None:
        namespace.update(__module__=packer.__module__, __doc__=packer.__doc__)

    # This finds the metaclass: the hosts' base classes are abstract ones.
    return types.new_class(packer.__name__, (packer, host_class), exec_body=fill)


def find_rule(name: enum.Enum | str, rules: dict[str, Rule]) -> tuple[str, Rule]:
    """Find a rule by its name, in upper or lower case, or by the host's enum member.

    Raises:
        ConfigError: no such rule.
    """
    key = name.name if isinstance(name, enum.Enum) else name
    rule = rules.get(key.upper()) if isinstance(key, str) else None
    if rule is None:
        raise ConfigError(f"Unknown packing algorithm: {name}; set one of {', '.join(rules)}")
    return key.upper(), rule


def next_fit(lengths: Ints, capacity: int) -> Rows:
    """Fill the last bin in input order; open a new one when the next sequence does not fit."""
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
    """Put the longest first, each into the first bin with room; on a tie the later one first."""
    return first_fit_in_order(lengths, capacity, np.argsort(lengths, kind="stable")[::-1])


def first_fit_shuffle(lengths: Ints, capacity: int) -> Rows:
    """First-fit in a shuffled order, which depends on the number of sequences only."""
    # NumPy keeps a bit generator's raw stream stable over versions, but not `permutation`.
    keys = np.random.PCG64(lengths.size).random_raw(lengths.size)
    return first_fit_in_order(lengths, capacity, np.argsort(keys, kind="stable"))


def first_fit_in_order(lengths: Ints, capacity: int, order: Ints) -> Rows:
    """Put each sequence of `order` into the first bin with room; bins keep that order."""
    bin_of, num_bins = first_fit(lengths[order], capacity)
    bins: Rows = [[] for _ in range(num_bins)]
    for i, number in zip(order.tolist(), bin_of.tolist(), strict=True):
        bins[number].append(i)
    return bins


def least_loaded(lengths: Ints, capacity: int) -> Rows:
    """Put the longest first into the emptiest bin, or into a new one if it does not fit there."""
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
    """Johnson and Garey 1985: at most 71/60 of the fewest bins, plus one.

    Classes of lengths: large (over 1/2 of the capacity), medium (over 1/3), small (over 1/6), tiny.

    1. Each large sequence opens a bin.
    2. From the first bin to the last: add the longest medium sequence that fits.
    3. From the last bin to the first, those without a medium sequence: add the shortest small one
       and the longest small one that fits beside it, if two fit.
    4. From the first bin to the last: add what fits of all sequences left, longest first.
    5. Pack the rest by first-fit-decreasing, or emptiest bin first if that gives fewer bins.
    """
    size = lengths.tolist()
    longest_first = np.argsort(-lengths, kind="stable").tolist()
    bins = [[i] for i in longest_first if 2 * size[i] > capacity]
    free = [capacity - size[row[0]] for row in bins]
    medium = [i for i in longest_first if capacity < 3 * size[i] and 2 * size[i] <= capacity]
    small = [i for i in longest_first if capacity < 6 * size[i] and 3 * size[i] <= capacity]
    tiny = [i for i in longest_first if 6 * size[i] <= capacity]

    def move_longest(items: list[int], number: int) -> bool:
        """Move the longest item that fits into a bin; `items` are sorted, longest first."""
        position = bisect.bisect_left(items, -free[number], key=lambda i: -size[i])
        if position == len(items):
            return False
        bins[number].append(items.pop(position))
        free[number] -= size[bins[number][-1]]
        return True

    without_medium = [number for number in range(len(bins)) if not move_longest(medium, number)]
    for number in reversed(without_medium):
        if len(small) > 1 and size[small[-1]] + size[small[-2]] <= free[number]:
            move_longest([small.pop()], number)
            move_longest(small, number)
    rest = sorted([*medium, *small, *tiny], key=lambda i: -size[i])
    for number in range(len(bins)):
        while move_longest(rest, number):
            pass
    if not rest:
        return bins
    packings = [rule(lengths[rest], capacity) for rule in (first_fit_decreasing, least_loaded)]
    return bins + [[rest[i] for i in row] for row in min(packings, key=len)]


def even_rows(lengths: Ints, work: Floats, capacity: int, spare: float = 0.0) -> Rows:
    """The rows of most even work, of the fewest rows that the rules below find or a few more.

    Args:
        lengths: int64 [n], at least one; one over the capacity is alone in its row.
        work: float64 [n].
        spare: how many more rows there may be, as a share of the fewest.
    """
    rules = (first_fit_decreasing, least_loaded, modified_first_fit_decreasing)
    found = [rule(lengths, capacity) for rule in rules]
    fewest = min(map(len, found))
    most = fewest + int(spare * fewest)
    for count in range(fewest, most + 1):
        row_of = pack_to_targets(lengths, work, np.full(count, work.sum() / count), capacity)
        if row_of is not None:
            found.append([np.flatnonzero(row_of == number).tolist() for number in range(count)])
            break

    def unevenness(rows: Rows) -> float:
        return sum(float(work[row].sum()) ** 2 for row in rows)

    return min((rows for rows in found if len(rows) <= most), key=unevenness)
