"""Rows of one and of several DP ranks, made by hand: a planner might choose others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from megapack.layout import Layout, block_ranks
from megapack.plan import MicroBatch, Part
from megapack.plan.plan import Plan, StepPlan
from megapack.prefixes import PrefixTable, Spans

Pieces = Mapping[int, tuple[int, int]]
"""Of a sample that a row has not whole: the first of its tokens there, and the one after the last.
"""
Slot = Sequence[tuple[Any, ...]]
"""The micro-batches at one place of all ranks' order: width, samples and `Pieces`, if there are
some, of each, from DP rank 0 on."""
WHOLE: Pieces = MappingProxyType({})


def made_row(
    samples: Sequence[int],
    lengths: Sequence[int],
    layout: Layout,
    dp_ranks: tuple[int, ...] = (),
    table: PrefixTable | None = None,
    pieces: Pieces = WHOLE,
) -> MicroBatch:
    """The row of these samples; without samples a padding micro-batch.

    Args:
        lengths: real tokens of every sample of the batch.
        layout: that of the plan.
        dp_ranks: see `MicroBatch.dp_ranks`.
        table: the prefixes of the plan.
        pieces: what the row has of samples that are not whole in it.
    """
    width = max(1, len(dp_ranks))
    over = layout.over(width)
    parts = [Part(i, *pieces.get(i, (0, lengths[i]))) for i in samples]
    aligned = [over.aligned_sample_tokens(part.tokens) for part in parts]
    # A piece attends to the tokens before it too: (begin + n)^2 - begin^2.
    before_sq = sum(2 * part.begin * n for part, n in zip(parts, aligned, strict=True))
    held = tuple(part for part in parts if part.sample in pieces)
    saved, saved_sq = (0, 0)
    if table is not None and len(samples) > 1:
        spans = Spans.of(samples, held)
        saved, saved_sq = table.over(width).saved_in_row(np.array(samples), spans)
    padded = over.aligned_row_tokens(sum(aligned) - saved)
    return MicroBatch(
        samples=tuple(samples),
        row_tokens=padded or over.row_alignment,
        tokens=sum(part.tokens for part in parts),
        tokens_sq=sum(n * n for n in aligned) + before_sq - saved_sq,
        padded_tokens=padded,
        shared_tokens=saved,
        dp_ranks=dp_ranks,
        pieces=held,
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
        for width, samples, *pieces in slot:
            block = block_ranks(first, width)
            row = made_row(samples, lengths, layout, block, table, *pieces)
            for rank in range(first, first + width):
                ranks[rank].append(row)
            first += width
        assert first == layout.dp
    return tuple(map(tuple, ranks))


def with_shared_rows(plan: Plan, lengths: Sequence[int], place: int, width: int = 2) -> Plan:
    """The plan, with the rows at one place of each block of DP ranks made into one that they share.

    Args:
        plan: made with context_parallel="dynamic" and without prefixes; blocks that share a row at
            this place already, or have only padding there, stay as they are.
        place: index into each rank's micro-batches.
        width: DP ranks of a block.
    """

    def shared(step: StepPlan) -> StepPlan:
        ranks = [list(rank) for rank in step.ranks]
        for first in range(0, plan.layout.dp, width):
            block = block_ranks(first, width)
            rows = [ranks[rank][place] for rank in block]
            samples = sorted(i for row in rows for i in row.samples)
            if samples and not any(row.dp_ranks for row in rows):
                row = made_row(samples, lengths, plan.layout, block)
                for rank in block:
                    ranks[rank][place] = row
        return replace(step, ranks=tuple(map(tuple, ranks)))

    return replace(plan, steps=tuple(map(shared, plan.steps)))
