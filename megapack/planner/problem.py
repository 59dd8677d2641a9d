"""One step's packing problem, and its draft before it becomes a `StepPlan`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from megapack.base.arrays import Floats, Ints
from megapack.cost.model import TOKENS, CostModel
from megapack.layout import Layout
from megapack.plan.plan import MicroBatch, RolloutId, StepPlan
from megapack.policy import Policy

PADDING = -1
"""The row number of a padding micro-batch."""


@dataclass(frozen=True, kw_only=True)
class StepProblem:
    """Samples of one step that are to be packed."""

    number: int
    """Which step, for messages."""
    samples: Ints
    """int64 [n]: indices into the input, rollout after rollout, item after item."""
    num: Ints
    """int64 [I]: samples of each item. An item is packed whole: a sample, or the samples that share
    a colocate id."""
    lengths: Ints
    """int64 [I]: real tokens."""
    aligned: Ints
    """int64 [I]: the same, sample alignment counted."""
    aligned_sq: Ints
    """int64 [I]: sum of the samples' squared aligned lengths."""
    capacity: int
    """Padded tokens that a row may hold, a multiple of the row alignment; -1 without a budget."""
    max_samples: int | None
    """Samples that a row may hold, for count-based plans."""
    layout: Layout
    policy: Policy
    cost: CostModel | None
    forward_only: bool

    @property
    def num_items(self) -> int:
        """What can be packed: rows that the step can fill at most."""
        return self.num.size

    @property
    def work(self) -> Floats:
        """Per item what it adds to a row's forward, in seconds or tokens: what is balanced."""
        cost = TOKENS if self.policy.balance == "tokens" or self.cost is None else self.cost
        work = cost.per_token * self.aligned.astype(np.float64)
        work += cost.per_token_sq * self.aligned_sq.astype(np.float64)
        return work + cost.per_sample * self.num

    def take(self, count: int) -> StepProblem:
        """The problem of the first `count` items."""
        return replace(
            self,
            samples=self.samples[: int(self.num[:count].sum())],
            num=self.num[:count],
            lengths=self.lengths[:count],
            aligned=self.aligned[:count],
            aligned_sq=self.aligned_sq[:count],
        )


@dataclass(frozen=True, kw_only=True)
class StepDraft:
    """Rows, and which rank takes which row when."""

    row_of: Ints
    """Per item of the problem its row; rows are numbered from 0 without a gap."""
    rank_rows: tuple[Ints, ...]
    """Per rank its rows in order; PADDING stands for a padding micro-batch."""
    group_size: int | None
    """G, None with vpp = 1."""


def build_step(
    problem: StepProblem,
    draft: StepDraft,
    kept: tuple[RolloutId, ...],
    dropped: tuple[RolloutId, ...],
) -> StepPlan:
    """The frozen form of a draft."""
    policy = problem.policy
    by_row = _micro_batches(problem, draft.row_of)
    unit = problem.layout.row_alignment
    by_row.append(MicroBatch((), unit, 0, 0, 0))  # found under PADDING = -1
    if policy.row_shape == "uniform":
        length = max(mb.row_tokens for mb in by_row)
        by_row = [
            MicroBatch(mb.samples, length, mb.tokens, mb.tokens_sq, mb.padded_tokens)
            for mb in by_row
        ]
    per_rank = policy.count_rule == "per_rank"
    return StepPlan(
        ranks=tuple(tuple(by_row[row] for row in rows.tolist()) for rows in draft.rank_rows),
        num_microbatches=None if per_rank else draft.rank_rows[0].size,
        group_size=draft.group_size,
        kept_rollouts=kept,
        dropped_rollouts=dropped,
    )


def _micro_batches(problem: StepProblem, row_of: Ints) -> list[MicroBatch]:
    """One planned-shape micro-batch per row; samples ascend within a row."""
    sample_row = np.repeat(row_of, problem.num)
    order = np.lexsort((problem.samples, sample_row))
    num_rows = int(row_of.max()) + 1
    tokens, padded, tokens_sq = row_sums(problem, row_of, num_rows)
    samples = problem.samples[order].tolist()
    ends = np.cumsum(np.bincount(sample_row, minlength=num_rows)).tolist()
    starts = [0, *ends[:-1]]
    return [
        MicroBatch(tuple(samples[start:end]), row, real, square, row)
        for start, end, row, real, square in zip(
            starts, ends, padded.tolist(), tokens.tolist(), tokens_sq.tolist(), strict=True
        )
    ]


def row_sums(problem: StepProblem, row_of: Ints, num_rows: int) -> tuple[Ints, Ints, Ints]:
    """Per row: real tokens, padded tokens, sum of squared aligned lengths; int64 [num_rows]."""
    tokens = np.zeros(num_rows, dtype=np.int64)
    padded = np.zeros(num_rows, dtype=np.int64)
    tokens_sq = np.zeros(num_rows, dtype=np.int64)
    np.add.at(tokens, row_of, problem.lengths)
    np.add.at(padded, row_of, problem.aligned)
    np.add.at(tokens_sq, row_of, problem.aligned_sq)
    return tokens, problem.layout.aligned_row_tokens(padded), tokens_sq
