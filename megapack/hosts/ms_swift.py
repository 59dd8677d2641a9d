"""ms-swift: `swift.dataset.packing.calculate_matched_group`, with packs of more even cost.

Seen at ms-swift 4.6.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from megapack.hosts import patching
from megapack.hosts.shared.bins import even_bins
from megapack.hosts.shared.rank_items import calculate_workload
from megapack.hosts.shared.rank_rows import log_own

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
        strategy: "binpack"; for "sequential", which keeps the input order, and all others
            ms-swift's own function is called.

    Returns:
        packs: sequences of each pack.
        rest: sequences for the next portion.
    """
    if strategy != "binpack":
        log_own("ms-swift", f"packing_strategy={strategy}; set binpack")
        own = patching.original("swift.dataset.packing.calculate_matched_group")
        return own(sequences, packing_length, is_finished, strategy)  # type: ignore[no-any-return]
    lengths = np.array([item[1] for item in sequences], dtype=np.int64)
    rows = even_bins(lengths, calculate_workload(lengths).astype(float), packing_length)
    rows.sort(key=lambda row: -int(lengths[row].sum()))
    rest = rows.pop() if rows and not is_finished else []
    return [[sequences[i] for i in row] for row in rows], [sequences[i] for i in rest]
