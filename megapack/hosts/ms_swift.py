"""ms-swift: `swift.dataset.packing.calculate_matched_group`, with packs of more even cost.

Seen at ms-swift 4.6.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from megapack.errors import ConfigError
from megapack.hosts.shared.bin_packers import even_rows, next_fit
from megapack.hosts.shared.verl_items import calculate_workload

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
        rows = even_rows(lengths, calculate_workload(lengths).astype(float), packing_length)
        rows.sort(key=lambda row: -int(lengths[row].sum()))
        is_open = True
    rest = rows.pop() if is_open and not is_finished else []
    return [[sequences[i] for i in row] for row in rows], [sequences[i] for i in rest]
