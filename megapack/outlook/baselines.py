"""Simple packing strategies, to compare a plan with.

Each takes what samples occupy in a row, in input order, and returns per rank its micro-batches as
lists of samples; an empty list is a padding micro-batch. M is rounded up to a multiple of G, as
other schedulers do, first by splitting the last rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from megapack.base.arrays import Ints
from megapack.layout import Layout
from megapack.plan.plan import MicroBatch, Plan, StepPlan

Rows = list[list[int]]
Ranks = list[Rows]

Fits = Callable[[int, int, int], bool]
"""Whether a row of this many samples, total and longest size is allowed."""


def next_fit(sizes: Ints, layout: Layout, capacity: int) -> Ranks:
    """A new row where the next sample is over the budget."""
    return _deal(_neighbours(sizes, lambda count, total, longest: total <= capacity), layout)


def naive_plans(plan: Plan, lengths: Ints) -> dict[str, Plan]:
    """A plan's steps as simple strategies would pack them: name -> the plan with their steps.

    "next-fit" packs neighbours until the budget is full. "padded" does, but pads all samples of a
    micro-batch to the longest of them, as rectangular batches are. "one sample" is one per
    micro-batch. Colocated samples are not kept together.

    Args:
        lengths: those that were planned, int64 [n].
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
    """The least multiple of dp * G (dp without chunks) that is not below."""
    return layout.dp * layout.next_legal_count(-(-num_rows // layout.dp), "multiple")


def in_turn(rows: Rows, layout: Layout) -> Ranks:
    """Row r to rank r % dp."""
    return [rows[rank :: layout.dp] for rank in range(layout.dp)]


def _neighbours(sizes: Ints, fits: Fits) -> Rows:
    rows: Rows = []
    count = total = longest = 0
    for i, size in enumerate(sizes.tolist()):
        count, total, longest = count + 1, total + size, max(longest, size)
        if rows and fits(count, total, longest):
            rows[-1].append(i)
        else:
            rows.append([i])
            count, total, longest = 1, size, size
    return rows


def _deal(rows: Rows, layout: Layout) -> Ranks:
    """As many rows as M needs: the last are halved, then padding is added."""
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
    layout, samples = plan.layout, np.array(step.kept_samples, dtype=np.int64)
    sizes = layout.aligned_sample_tokens(lengths[samples])
    ranks = _deal(_neighbours(sizes, fits), layout)

    def micro_batch(row: list[int]) -> MicroBatch:
        return _micro_batch(row, samples, lengths, sizes, layout, pad)

    return StepPlan(
        ranks=tuple(tuple(map(micro_batch, rank)) for rank in ranks),
        num_microbatches=len(ranks[0]),
        group_size=layout.group_size if layout.vpp > 1 else None,
        kept_rollouts=step.kept_rollouts,
        dropped_rollouts=step.dropped_rollouts,
    )


def _micro_batch(
    row: list[int], samples: Ints, lengths: Ints, sizes: Ints, layout: Layout, pad: bool
) -> MicroBatch:
    if not row:
        return MicroBatch((), layout.row_alignment, 0, 0, 0)
    taken = np.full(len(row), sizes[row].max()) if pad else sizes[row]
    row_tokens = layout.aligned_row_tokens(int(taken.sum()))
    return MicroBatch(
        samples=tuple(samples[row].tolist()),
        row_tokens=row_tokens,
        tokens=int(lengths[samples[row]].sum()),
        tokens_sq=int((taken * taken).sum()),
        padded_tokens=row_tokens,
    )
