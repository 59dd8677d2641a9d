"""Simple packing strategies to compare a plan with.

Each gets the aligned sizes of the samples in input order and returns the micro-batches of each DP
rank as lists of samples; an empty list is a padding micro-batch. M is rounded up to a multiple of
G, as other schedulers do: the last rows are split first, then padding micro-batches are added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from megapack.base.arrays import Ints
from megapack.layout import Layout
from megapack.plan.plan import MicroBatch, Plan, StepPlan

Rows = list[list[int]]
"""Samples of each micro-batch."""
Ranks = list[Rows]
"""Rows of each DP rank."""

Fits = Callable[[int, int, int], bool]
"""Whether a row may have this number of samples, total size and longest size."""


def next_fit(sizes: Ints, layout: Layout, capacity: int) -> Ranks:
    """Samples in input order; a new row starts when the next sample would exceed the capacity."""
    rows = _pack_neighbours(sizes, lambda count, total, longest: total <= capacity)
    return _to_ranks(rows, layout)


def naive_plans(plan: Plan, lengths: Ints) -> dict[str, Plan]:
    """Pack the samples of each step with simple strategies; returns a plan per strategy name.

    "next-fit" packs neighbours until the budget is full. "padded" does the same, but pads all
    samples of a micro-batch to the longest of them, as in rectangular batches. "one sample" has one
    sample per micro-batch. Colocated samples are not kept together.

    Args:
        lengths: int64 [n], as they were planned.
    """
    capacity = plan.capacity
    most = plan.micro_batch_size or 0

    def packed(count: int, total: int, longest: int) -> bool:
        return count <= most if capacity is None else total <= capacity

    def padded(count: int, total: int, longest: int) -> bool:
        return count <= most if capacity is None else count * longest <= capacity

    strategies: dict[str, tuple[Fits, bool]] = {
        "next-fit": (packed, False),
        "padded": (padded, True),
        "one sample": (lambda count, total, longest: False, False),
    }
    return {
        name: replace(
            plan, steps=tuple(_step(plan, step, lengths, fits, pad) for step in plan.steps)
        )
        for name, (fits, pad) in strategies.items()
    }


def aligned_rows(num_rows: int, layout: Layout) -> int:
    """Round up to a multiple of dp * G, of dp if vpp=1. With dp=2, G=3: 7 rows become 12."""
    return layout.dp * layout.next_legal_count(-(-num_rows // layout.dp), "multiple")


def in_turn(rows: Rows, layout: Layout) -> Ranks:
    """Row r to rank r % dp."""
    return [rows[rank :: layout.dp] for rank in range(layout.dp)]


def _pack_neighbours(sizes: Ints, fits: Fits) -> Rows:
    rows: Rows = []
    count = total = longest = 0
    for i, size in enumerate(sizes.tolist()):
        count += 1
        total += size
        longest = max(longest, size)
        if rows and fits(count, total, longest):
            rows[-1].append(i)
        else:
            rows.append([i])
            count = 1
            total = longest = size
    return rows


def _to_ranks(rows: Rows, layout: Layout) -> Ranks:
    """Halve the last rows, then add padding micro-batches, until M is a multiple of G."""
    target = aligned_rows(len(rows), layout)
    at = len(rows) - 1
    while len(rows) < target and at >= 0:
        row = rows[at]
        if len(row) > 1:
            rows[at : at + 1] = [row[: len(row) // 2], row[len(row) // 2 :]]
        else:
            at -= 1
    rows += [[] for _ in range(target - len(rows))]
    return in_turn(rows, layout)


def _step(plan: Plan, step: StepPlan, lengths: Ints, fits: Fits, pad: bool) -> StepPlan:
    layout = plan.layout
    samples = np.array(step.kept_samples, dtype=np.int64)
    sizes = layout.aligned_sample_tokens(lengths[samples])
    ranks = _to_ranks(_pack_neighbours(sizes, fits), layout)

    tokens = lengths[samples].tolist()
    occupied = sizes.tolist()

    def micro_batch(row: list[int]) -> MicroBatch:
        return _micro_batch(row, step.kept_samples, tokens, occupied, layout, pad)

    return StepPlan(
        ranks=tuple(tuple(map(micro_batch, rank)) for rank in ranks),
        num_microbatches=len(ranks[0]),
        group_size=layout.group_size if layout.vpp > 1 else None,
        kept_rollouts=step.kept_rollouts,
        dropped_rollouts=step.dropped_rollouts,
    )


def _micro_batch(
    row: list[int],
    samples: Sequence[int],
    tokens: Sequence[int],
    sizes: Sequence[int],
    layout: Layout,
    pad: bool,
) -> MicroBatch:
    # Rows are short: Python's sums take less time than calls of numpy.
    if not row:
        return MicroBatch((), layout.row_alignment, 0, 0, 0)
    occupied = [sizes[i] for i in row]
    if pad:
        occupied = [max(occupied)] * len(row)
    row_tokens = layout.aligned_row_tokens(sum(occupied))
    return MicroBatch(
        samples=tuple(samples[i] for i in row),
        row_tokens=row_tokens,
        tokens=sum(tokens[i] for i in row),
        tokens_sq=sum(size * size for size in occupied),
        padded_tokens=row_tokens,
    )
