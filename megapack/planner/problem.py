"""One step's packing problem, and its draft before it becomes a `StepPlan`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megapack.base.arrays import Floats, Ints
from megapack.base.jit import kernel
from megapack.cost.model import TOKENS, CostModel
from megapack.layout import Layout, block_ranks
from megapack.plan.plan import MicroBatch, RolloutId, StepPlan
from megapack.planner.bins import first_fit, first_fit_decreasing
from megapack.policy import Policy
from megapack.prefixes import PrefixTable

PADDING = -1
"""The row number of a padding micro-batch, which has no row."""


class ItemSizes(NamedTuple):
    """Sizes of a problem's items in rows of one width, int64 [I] each; see `StepProblem`."""

    aligned: Ints
    aligned_sq: Ints
    shared: Ints
    shared_sq: Ints


class ItemPieces(NamedTuple):
    """Which items of a problem are pieces of cut samples, int64 [I] each."""

    start: Ints
    """First padded token of the piece; 0 for a whole item."""
    end: Ints
    """Padded token after its last one; the item's padded tokens for a whole item."""
    chain: Ints
    """Number of the piece's chain; -1 for a whole item. The pieces of a chain are neighbours, in
    the order of their tokens."""


@dataclass(frozen=True, kw_only=True)
class StepProblem:
    """The samples of one step, n of them in I items, and what the plan must respect.

    An item is packed whole: a sample, or all samples with the same colocate id.
    """

    number: int
    """The step's number, for messages."""
    samples: Ints
    """int64 [n]: indices into the input, sorted by rollout, then by item."""
    item_samples: Ints
    """int64 [I]: number of samples of each item."""
    lengths: Ints
    """int64 [I]: real tokens of each item."""
    aligned: Ints
    """int64 [I]: padded tokens of each item, with the sample alignment, without `shared`."""
    aligned_sq: Ints
    """int64 [I]: sum of the squared aligned lengths of the item's samples, without `shared_sq`."""
    shared: Ints
    """int64 [I]: positions that the item's samples share among themselves, as far as `aligned` does
    not count them."""
    shared_sq: Ints
    """int64 [I]: the sum of their squares, as `PrefixTable.saved` gives it."""
    capacity: int
    """Padded tokens that a row may hold, a multiple of the row alignment; -1 without a budget."""
    max_samples: int | None
    """Samples that a row of a count-based plan may hold; None for a plan with a budget."""
    layout: Layout
    policy: Policy
    cost: CostModel | None
    forward_only: bool
    prefixes: PrefixTable | None = None
    """What samples of a row share; None: nothing."""
    batch_lengths: Ints
    """int64: real tokens of every sample of the input, those of other steps included."""
    pieces: ItemPieces | None = None
    """The items that are pieces; None: all items are whole."""

    @property
    def sample_lengths(self) -> Ints:
        """int64 [n]: real tokens of each sample."""
        return self.batch_lengths[self.samples]

    def at_width(self, width: int) -> ItemSizes:
        """The items' sizes in rows over `width` DP ranks, whose alignment is coarser."""
        if width == 1:
            return ItemSizes(self.aligned, self.aligned_sq, self.shared, self.shared_sq)
        aligned = self.layout.over(width).aligned_sample_tokens(self.sample_lengths)
        starts = np.cumsum(self.item_samples) - self.item_samples
        tokens = np.add.reduceat(aligned, starts)
        tokens_sq = np.add.reduceat(aligned * aligned, starts)
        if self.prefixes is None or not self.shared.any():
            return ItemSizes(tokens, tokens_sq, self.shared, self.shared_sq)
        item_of = np.repeat(np.arange(self.num_items), self.item_samples)
        table = self.prefixes.over(width)
        saved, saved_sq = table.saved(self.samples, item_of, self.num_items)
        shared = np.where(self.shared > 0, saved, 0)
        shared_sq = np.where(self.shared > 0, saved_sq, 0)
        return ItemSizes(tokens - shared, tokens_sq - shared_sq, shared, shared_sq)

    @property
    def num_items(self) -> int:
        """I; the step can fill at most this many rows."""
        return self.item_samples.size

    @property
    def work(self) -> Floats:
        """float64 [I]: what each item adds to a row's forward, in seconds or tokens.

        Rows and ranks are balanced by it.
        """
        per_token, per_token_sq = self.work_per_token
        work = per_token * self.aligned.astype(np.float64)
        work += per_token_sq * self.aligned_sq.astype(np.float64)
        return work + self._balanced_cost.per_sample * self.item_samples

    @property
    def work_per_token(self) -> tuple[float, float]:
        """Work of a token and of a squared token."""
        cost = self._balanced_cost
        return float(cost.per_token), float(cost.per_token_sq)

    @property
    def _balanced_cost(self) -> CostModel:
        return TOKENS if self.policy.balance == "tokens" or self.cost is None else self.cost

    @cached_property
    def fewest_rows(self) -> tuple[Ints, int]:
        """Rows within the budget, as few as first-fit-decreasing finds.

        Count-based problems fill rows of `max_samples` in input order.

        Returns:
            row_of: int64 [I], the row of each item.
            num_rows: number of rows.
        """
        if self.max_samples is not None:
            return first_fit(self.item_samples, self.max_samples)
        return first_fit_decreasing(self.aligned, self.capacity)

    def take(self, count: int) -> StepProblem:
        """The problem of the first `count` items."""
        return replace(
            self,
            samples=self.samples[: int(self.item_samples[:count].sum())],
            item_samples=self.item_samples[:count],
            lengths=self.lengths[:count],
            aligned=self.aligned[:count],
            aligned_sq=self.aligned_sq[:count],
            shared=self.shared[:count],
            shared_sq=self.shared_sq[:count],
        )

    def saved(self, row_of: Ints, num_rows: int, width: int = 1) -> tuple[Ints, Ints]:
        """Tokens and squared tokens that rows save in all, `shared` of their items included.

        Args:
            row_of: int64 [I], the row of each item.
            width: that of all rows.

        Returns:
            int64 [num_rows] each.
        """
        if self.prefixes is None:
            return np.zeros(num_rows, dtype=np.int64), np.zeros(num_rows, dtype=np.int64)
        sample_row = np.repeat(row_of, self.item_samples)
        return self.prefixes.over(width).saved(self.samples, sample_row, num_rows)


@dataclass(frozen=True, kw_only=True)
class StepDraft:
    """Rows, and the order in which each rank runs its rows."""

    row_of: Ints
    """int64 [I]: the row of each item; rows are numbered from 0 without a gap."""
    rank_rows: tuple[Ints, ...]
    """Per rank int64 [M]: its rows in order; PADDING stands for a padding micro-batch. A row over
    several ranks stands at the same place of each."""
    group_size: int | None
    """G; None with vpp=1."""
    widths: Ints | None = None
    """int64 [R]: DP ranks of each row; None: one each."""
    orders: tuple[tuple[str, ...], ...] = ()
    """See `StepPlan.orders`."""


def build_step(
    problem: StepProblem,
    draft: StepDraft,
    kept: tuple[RolloutId, ...],
    dropped: tuple[RolloutId, ...],
) -> StepPlan:
    """Turn a draft into the plan of its step.

    Args:
        kept: ids of the rollouts that the step trains on.
        dropped: ids of the rollouts that it leaves out.
    """
    rows = _micro_batches(problem, draft)
    padding = MicroBatch((), problem.layout.row_alignment, 0, 0, 0)
    if problem.policy.row_shape == "uniform":
        longest = max(row.row_tokens for row in rows)
        rows = [replace(row, row_tokens=longest) for row in rows]
        padding = replace(padding, row_tokens=longest)
    per_rank = problem.policy.count_rule == "per_rank"
    # The last of the list is number -1, PADDING.
    rows.append(padding)
    return StepPlan(
        ranks=tuple(
            tuple(map(rows.__getitem__, rank_rows.tolist())) for rank_rows in draft.rank_rows
        ),
        num_microbatches=None if per_rank else draft.rank_rows[0].size,
        group_size=draft.group_size,
        kept_rollouts=kept,
        dropped_rollouts=dropped,
        orders=draft.orders,
    )


def _micro_batches(problem: StepProblem, draft: StepDraft) -> list[MicroBatch]:
    """One micro-batch per row, as long as its samples; a piece first, then samples ascend."""
    row_of = draft.row_of
    sample_row = np.repeat(row_of, problem.item_samples)
    num_rows = int(row_of.max()) + 1
    pieces = _row_pieces(problem, row_of, num_rows)
    order = np.argsort(problem.samples, kind="stable")
    if problem.pieces is not None:
        is_whole = np.repeat(problem.pieces.chain < 0, problem.item_samples)
        order = order[np.argsort(is_whole[order], kind="stable")]
    order = order[by_row(sample_row[order], num_rows)]
    widths = np.ones(num_rows, dtype=np.int64) if draft.widths is None else draft.widths
    tokens = row_sums(problem.lengths, row_of, num_rows)
    padded, tokens_sq, shared = np.zeros((3, num_rows), dtype=np.int64)
    for width in np.unique(widths).tolist():
        rows = widths == width
        own_tokens, own_sq, saved = _row_sizes(problem, row_of, num_rows, width)
        padded[rows] = problem.layout.over(width).aligned_row_tokens(own_tokens[rows])
        tokens_sq[rows] = own_sq[rows]
        shared[rows] = saved[rows]
    samples = problem.samples[order].tolist()
    ends = np.cumsum(np.bincount(sample_row, minlength=num_rows)).tolist()
    starts = [0, *ends[:-1]]
    ranks = _row_ranks(draft, widths)
    columns = (starts, ends, *(c.tolist() for c in (padded, tokens, tokens_sq, shared)), ranks)
    return [
        MicroBatch(tuple(samples[start:end]), row, real, square, row, saved, dp_ranks, piece)
        for start, end, row, real, square, saved, dp_ranks, piece in zip(
            *columns, pieces, strict=True
        )
    ]


def _row_pieces(problem: StepProblem, row_of: Ints, num_rows: int) -> list[tuple[int, int] | None]:
    """The real tokens of each row's piece; None for a row without one."""
    found: list[tuple[int, int] | None] = [None] * num_rows
    if problem.pieces is None:
        return found
    start, _, chain = problem.pieces
    for item in np.flatnonzero(chain >= 0).tolist():
        first = int(start[item])
        found[int(row_of[item])] = (first, first + int(problem.lengths[item]))
    return found


def _row_sizes(
    problem: StepProblem, row_of: Ints, num_rows: int, width: int
) -> tuple[Ints, Ints, Ints]:
    """Tokens, squared tokens and shared tokens of rows of one width, int64 [num_rows] each."""
    sizes = problem.at_width(width)
    shared, shared_sq = problem.saved(row_of, num_rows, width)
    tokens = row_sums(sizes.aligned + sizes.shared, row_of, num_rows) - shared
    tokens_sq = row_sums(sizes.aligned_sq + sizes.shared_sq, row_of, num_rows) - shared_sq
    return tokens, tokens_sq, shared


def _row_ranks(draft: StepDraft, widths: Ints) -> list[tuple[int, ...]]:
    """The DP ranks of each row that several ranks share; () for other rows."""
    ranks: list[tuple[int, ...]] = [()] * widths.size
    if draft.widths is None:
        return ranks
    for rank, rows in enumerate(draft.rank_rows):
        for row in rows[rows >= 0].tolist():
            ranks[row] = ranks[row] or block_ranks(rank, int(widths[row]))
    return ranks


@kernel
def by_row(row_of: Ints, num_rows: int) -> Ints:
    """Items row after row, int64 [I]; those of one row keep their order."""
    begin = np.zeros(num_rows + 1, dtype=np.int64)
    for row in row_of:
        begin[row + 1] += 1
    for row in range(num_rows):
        begin[row + 1] += begin[row]
    order = np.empty(row_of.size, dtype=np.int64)
    for item in range(row_of.size):
        row = row_of[item]
        order[begin[row]] = item
        begin[row] += 1
    return order


def members_by_row(row_of: Ints, num_rows: int) -> list[Ints]:
    """The items of each row, ascending."""
    order = by_row(row_of, num_rows)
    ends = np.cumsum(np.bincount(row_of, minlength=num_rows)).tolist()
    return [order[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def row_sums(values: Ints, row_of: Ints, num_rows: int) -> Ints:
    """int64 [num_rows]: sum of the items' values in each row."""
    sums = np.zeros(num_rows, dtype=np.int64)
    np.add.at(sums, row_of, values)
    return sums
