"""`Draft`: a step's rows and their order, before they become a `StepPlan`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from megapack.base.arrays import Ints
from megapack.layout import block_ranks
from megapack.pipeline.simulator import simulate
from megapack.plan.microbatch import MicroBatch, Part
from megapack.plan.plan import RolloutId, StepPlan
from megapack.planner.items import Items, row_sums
from megapack.planner.step import Step

PADDING = -1
"""The row number of a padding micro-batch, which has no row."""


@dataclass(frozen=True, kw_only=True)
class Draft:
    """Items in rows, and the order in which each rank runs its rows."""

    items: Items
    row_of: Ints
    """int64 [I]: the row of each item; rows are numbered from 0 without a gap."""
    rank_rows: tuple[Ints, ...]
    """Per rank int64 [M]: its rows in order; PADDING stands for a padding micro-batch. A row over
    several ranks stands at the same place of each."""
    widths: Ints
    """int64 [R]: DP ranks of each row."""
    orders: tuple[tuple[str, ...], ...] = ()
    """See `StepPlan.orders`."""
    board_seconds: float | None = None
    """Simulated seconds of the step, where the search that made the draft knows them."""

    @property
    def num_microbatches(self) -> int:
        """M."""
        return self.rank_rows[0].size

    @cached_property
    def num_rows(self) -> int:
        """R."""
        return int(self.row_of.max()) + 1

    @cached_property
    def sizes(self) -> tuple[Ints, Ints, Ints]:
        """Aligned tokens, squared tokens and shared tokens of each row with the alignment of its
        width; what its samples share counts once. int64 [R] each."""
        sizes = np.zeros((3, self.num_rows), dtype=np.int64)
        for width in np.unique(self.widths).tolist():
            rows = self.widths == width
            sizes[:, rows] = np.stack(self._sizes_at(width))[:, rows]
        tokens, tokens_sq, shared = sizes
        return tokens, tokens_sq, shared

    def _sizes_at(self, width: int) -> tuple[Ints, Ints, Ints]:
        """`sizes`, if all rows had this width."""
        items, row_of, num_rows = self.items, self.row_of, self.num_rows
        own = items.at_width(width)
        shared, shared_sq = items.saved(row_of, num_rows, width)
        tokens = row_sums(own.aligned + own.shared, row_of, num_rows) - shared
        tokens_sq = row_sums(own.aligned_sq + own.shared_sq, row_of, num_rows) - shared_sq
        return tokens, tokens_sq, shared

    def row_tokens(self) -> Ints:
        """int64 [R]: padded tokens of each row."""
        tokens = self.sizes[0]
        padded = np.empty_like(tokens)
        for width in np.unique(self.widths).tolist():
            rows = self.widths == width
            layout = self.items.step.layout.over(width)
            padded[rows] = layout.aligned_row_tokens(tokens[rows])
        return padded

    def under(self, step: Step) -> Draft:
        """The same rows and orders, of a step with other costs."""
        is_same = step is self.items.step
        return self if is_same else replace(self, items=self.items.under(step), board_seconds=None)

    def seconds(self) -> float:
        """Simulated seconds of the step by the cost model."""
        if self.board_seconds is not None:
            return self.board_seconds
        step = self.items.step
        simulation = simulate(
            self.to_plan((), ()),
            layout=step.layout,
            cost=step.cost,
            lockstep=step.lockstep,
            forward_only=step.forward_only,
        )
        return simulation.makespan

    def to_plan(self, kept: tuple[RolloutId, ...], dropped: tuple[RolloutId, ...]) -> StepPlan:
        """The plan of the step.

        Args:
            kept: ids of the rollouts that the step trains on.
            dropped: ids of the rollouts that it leaves out.
        """
        step = self.items.step
        rows = _micro_batches(self)
        padding = MicroBatch((), step.layout.aligned_row_tokens(1), 0, 0, 0)
        if step.policy.row_shape == "uniform":
            longest = max(row.row_tokens for row in rows)
            rows = [replace(row, row_tokens=longest) for row in rows]
            padding = replace(padding, row_tokens=longest)
        ranks = (rank_rows.tolist() for rank_rows in self.rank_rows)
        return StepPlan(
            ranks=tuple(
                tuple(padding if row == PADDING else rows[row] for row in own) for own in ranks
            ),
            num_microbatches=self.num_microbatches,
            group_size=step.group_size,
            kept_rollouts=kept,
            dropped_rollouts=dropped,
            orders=self.orders,
        )


def _micro_batches(draft: Draft) -> list[MicroBatch]:
    """One micro-batch per row, as long as its samples; a piece first, then samples ascend within
    their adapter. Adapters ascend, from that of the piece on."""
    items = draft.items
    row_of = draft.row_of
    num_rows = draft.num_rows
    sample_row = row_of[items.sample_items]
    pieces = _row_pieces(draft)
    is_piece, adapters = items.is_piece[items.sample_items], items.sample_adapters
    first = np.zeros(num_rows, dtype=np.int64)
    first[sample_row[is_piece]] = adapters[is_piece]
    turn = (adapters - first[sample_row]) % (adapters.max() + 1)
    order = np.lexsort((items.samples, turn, ~is_piece))
    order = order[np.argsort(sample_row[order], kind="stable")]
    tokens = row_sums(items.lengths, row_of, num_rows)
    _, tokens_sq, shared = draft.sizes
    padded = draft.row_tokens()
    samples = items.samples[order].tolist()
    ends = np.cumsum(np.bincount(sample_row, minlength=num_rows)).tolist()
    starts = [0, *ends[:-1]]
    ranks = _row_ranks(draft)
    columns = (starts, ends, *(c.tolist() for c in (padded, tokens, tokens_sq, shared)), ranks)
    return [
        MicroBatch(tuple(samples[start:end]), row, real, square, row, saved, dp_ranks, parts)
        for start, end, row, real, square, saved, dp_ranks, parts in zip(
            *columns, pieces, strict=True
        )
    ]


def _row_pieces(draft: Draft) -> list[tuple[Part, ...]]:
    """The real tokens of the pieces in each row."""
    items = draft.items
    found: list[tuple[Part, ...]] = [()] * draft.num_rows
    if not items.num_pieces:
        return found
    item = items.sample_items
    ends = np.minimum(items.end[item], items.sample_lengths)
    columns = (draft.row_of[item], items.samples, items.begin[item], ends)
    is_piece = items.is_piece[item]
    order = np.flatnonzero(is_piece)[np.argsort(items.samples[is_piece], kind="stable")]
    for row, *part in zip(*(column[order].tolist() for column in columns), strict=True):
        found[row] += (Part(*part),)
    return found


def _row_ranks(draft: Draft) -> list[tuple[int, ...]]:
    """The DP ranks of each row that several ranks share; () for other rows."""
    ranks: list[tuple[int, ...]] = [()] * draft.widths.size
    for rank, rows in enumerate(draft.rank_rows):
        own = rows[rows >= 0]
        for row in own[draft.widths[own] > 1].tolist():
            ranks[row] = ranks[row] or block_ranks(rank, int(draft.widths[row]))
    return ranks
