"""Rows of one and of several DP ranks, made by hand: a planner might choose others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megapack.layout import Layout, block_ranks
from megapack.plan import MicroBatch
from megapack.prefixes import PrefixTable

Slot = Sequence[tuple[int, Sequence[int]]]
"""The micro-batches at one place of all ranks' order: width and samples of each, from DP rank 0 on.
"""


def made_row(
    samples: Sequence[int],
    lengths: Sequence[int],
    layout: Layout,
    dp_ranks: tuple[int, ...] = (),
    table: PrefixTable | None = None,
) -> MicroBatch:
    """The row of these samples; without samples a padding micro-batch.

    Args:
        lengths: real tokens of every sample of the batch.
        layout: that of the plan.
        dp_ranks: see `MicroBatch.dp_ranks`.
        table: the prefixes of the plan.
    """
    width = max(1, len(dp_ranks))
    over = layout.over(width)
    aligned = [over.aligned_sample_tokens(lengths[i]) for i in samples]
    saved, saved_sq = (0, 0)
    if table is not None and len(samples) > 1:
        saved, saved_sq = table.over(width).saved_in_row(np.array(samples))
    padded = over.aligned_row_tokens(sum(aligned) - saved)
    return MicroBatch(
        samples=tuple(samples),
        row_tokens=padded or over.row_alignment,
        tokens=sum(lengths[i] for i in samples),
        tokens_sq=sum(n * n for n in aligned) - saved_sq,
        padded_tokens=padded,
        shared_tokens=saved,
        dp_ranks=dp_ranks,
    )


def made_ranks(
    slots: Sequence[Slot],
    lengths: Sequence[int],
    layout: Layout,
    table: PrefixTable | None = None,
) -> tuple[tuple[MicroBatch, ...], ...]:
    """`StepPlan.ranks` of these slots; the other arguments are those of `made_row`."""
    ranks: list[list[MicroBatch]] = [[] for _ in range(layout.dp)]
    for slot in slots:
        first = 0
        for width, samples in slot:
            row = made_row(samples, lengths, layout, block_ranks(first, width), table)
            for rank in range(first, first + width):
                ranks[rank].append(row)
            first += width
        assert first == layout.dp
    return tuple(map(tuple, ranks))
