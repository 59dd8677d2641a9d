"""ms-swift: `swift.dataset.packing.calculate_matched_group`, with packs of more even cost.

Seen at ms-swift 4.6.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from megapack.base.arrays import Ints
from megapack.errors import ConfigError
from megapack.hosts.shared.bin_packers import (
    first_fit_decreasing,
    least_loaded,
    modified_first_fit_decreasing,
    next_fit,
)
from megapack.hosts.shared.rank_rows import Rows
from megapack.hosts.shared.verl_items import calculate_workload
from megapack.planner.bins import pack_to_targets

_RULES = (first_fit_decreasing, least_loaded, modified_first_fit_decreasing)

Item = TypeVar("Item", bound=Sequence[object])
"""A sequence: its index or fields, then its tokens."""


def calculate_matched_group(
    sequences: Sequence[Item],
    packing_length: int,
    is_finished: bool = True,
    strategy: str = "binpack",
) -> tuple[list[list[Item]], list[Item]]:
    """Pack sequences of one portion of the data set.

    Args:
        sequences: (anything, tokens) each; ms-swift gives 1000 at a time and those left over.
        packing_length: tokens of a pack; a longer sequence is alone.
        is_finished: this is the last portion. If not, the lightest pack is left over.
        strategy: "binpack" or "sequential", which keeps the input order.

    Returns:
        packs: sequences of each pack.
        rest: sequences for the next portion.

    Raises:
        ConfigError: another strategy.
    """
    if strategy not in ("binpack", "sequential"):
        raise ConfigError(f"packing_strategy={strategy!r}; set 'binpack' or 'sequential'")
    if not sequences:
        return [], []
    lengths = np.array([item[1] for item in sequences], dtype=np.int64)
    if strategy == "sequential":
        rows = next_fit(lengths, packing_length)
        # A full pack is complete, whatever comes next.
        is_open = int(lengths[rows[-1]].sum()) < packing_length
    else:
        rows = _even_rows(lengths, packing_length)
        rows.sort(key=lambda row: -int(lengths[row].sum()))
        is_open = True
    rest = rows.pop() if is_open and not is_finished else []
    return [[sequences[i] for i in row] for row in rows], [sequences[i] for i in rest]


def _even_rows(lengths: Ints, capacity: int) -> Rows:
    """The fewest rows that the rules below find, and of those the rows of most even work."""
    work = calculate_workload(lengths).astype(float)
    found = [rule(lengths, capacity) for rule in _RULES]
    count = min(map(len, found))
    targets = np.full(count, work.sum() / count)
    row_of = pack_to_targets(lengths, work, targets, capacity)
    if row_of is not None:
        found.append([np.flatnonzero(row_of == number).tolist() for number in range(count)])

    def unevenness(rows: Rows) -> tuple[int, float]:
        return len(rows), sum(float(work[row].sum()) ** 2 for row in rows)

    return min(found, key=unevenness)
