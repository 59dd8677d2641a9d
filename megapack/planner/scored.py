"""From a draft to the arrays of the compiled search, and back."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from megapack.base.arrays import Ints
from megapack.cost.model import CostModel
from megapack.pipeline.kernels import RankOps
from megapack.pipeline.simulator import Runner
from megapack.planner.draft import PADDING, Draft
from megapack.planner.refine import refine
from megapack.planner.state import RowCost, State, fill_rows, score_all
from megapack.planner.step import Step


@dataclass
class Scored:
    """A simulated draft."""

    draft: Draft
    state: State
    """The draft in arrays."""
    cost: RowCost
    ops: RankOps
    """Operations of all ranks."""
    bounds: Ints
    """int64 [dp, 2]: rank r's operations are those from bounds[r, 0] to bounds[r, 1]."""
    seconds: float
    """Simulated seconds of the step; inf if a rank breaks the cap on live tokens."""

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of all ranks, with padding ones."""
        return int(self.state.counts.sum())

    def refine(self, runner: Runner, budget: int, lockstep: bool) -> int:
        """Improve the draft in place by up to `budget` simulations; returns those spent."""
        passes = runner.busiest_stage_seconds(np.ones(1))
        used = refine(self.cost, self.state, self.ops, self.bounds, lockstep, budget, passes)
        self.seconds = float(self.state.seconds.max())
        self.draft = moved(self.draft, self.state)
        return int(used)


def moved(draft: Draft, state: State) -> Draft:
    """A draft after moves of its state."""
    rows = zip(state.rows, state.counts.tolist(), strict=True)
    rank_rows = tuple(own[:count].copy() for own, count in rows)
    return replace(draft, row_of=state.row_of, rank_rows=rank_rows)


def score_draft(draft: Draft, cost: CostModel, runner: Runner) -> Scored:
    """Simulate every rank of a draft under a cost model: dp evaluations.

    Rows count what the samples of an item share, and no more.
    """
    state = draft_state(draft)
    ops, bounds = _all_ops(runner, draft)
    row_cost = row_cost_of(draft.items.step, cost, state)
    lockstep = draft.items.step.lockstep
    seconds = float(score_all(row_cost, state, ops, bounds, lockstep))
    return Scored(draft, state, row_cost, ops, bounds, seconds)


def draft_state(draft: Draft) -> State:
    """The arrays of a draft, with seconds that are not simulated yet."""
    items = draft.items
    num_rows = draft.num_rows
    counts = np.array([rows.size for rows in draft.rank_rows])
    rows = np.full((counts.size, int(counts.max())), PADDING, dtype=np.int64)
    for rank, rank_rows in enumerate(draft.rank_rows):
        rows[rank, : rank_rows.size] = rank_rows
    state = State(
        item_tokens=items.aligned,
        item_tokens_sq=items.aligned_sq,
        item_samples=items.item_samples,
        row_of=draft.row_of.copy(),
        next=np.empty(items.num_items, dtype=np.int64),
        head=np.full(num_rows, -1, dtype=np.int64),
        tokens=np.zeros(num_rows, dtype=np.int64),
        tokens_sq=np.zeros(num_rows, dtype=np.int64),
        num_samples=np.zeros(num_rows, dtype=np.int64),
        num_items=np.zeros(num_rows, dtype=np.int64),
        rows=rows,
        counts=counts,
        seconds=np.zeros(counts.size),
    )
    fill_rows(state)
    return state


def real_state(draft: Draft) -> State:
    """The same with rows as long as they will be: the items of a row share, too."""
    state = draft_state(draft)
    if draft.items.step.prefixes is not None:
        saved, saved_sq = draft.items.saved_by_rows(draft.row_of, draft.num_rows)
        state.tokens[:] -= saved
        state.tokens_sq[:] -= saved_sq
    return state


def real_seconds(draft: Draft) -> float:
    """Simulated seconds of a draft of rows on one rank each, in Megatron's order, by the cost
    model; inf if a rank breaks the cap on live tokens."""
    step = draft.items.step
    state = real_state(draft)
    ops, bounds = _all_ops(step.runner(step.real_cost), draft)
    row_cost = row_cost_of(step, step.real_cost, state)
    return float(score_all(row_cost, state, ops, bounds, step.lockstep))


def _all_ops(runner: Runner, draft: Draft) -> tuple[RankOps, Ints]:
    """The operations of each M that occurs, one after the other, and each rank's bounds in them."""
    counts = [rows.size for rows in draft.rank_rows]
    distinct = sorted(set(counts))
    each = [runner.ops(count, draft.group_size) for count in distinct]
    if len(each) == 1:
        return each[0], np.array([[0, each[0].stage.size]] * len(counts))
    ends = np.cumsum([ops.stage.size for ops in each]).tolist()
    bounds_of = {
        count: (end - ops.stage.size, end)
        for count, ops, end in zip(distinct, each, ends, strict=True)
    }
    all_ops = RankOps(
        np.concatenate([ops.stage for ops in each]),
        np.concatenate([ops.microbatch for ops in each]),
        np.concatenate([ops.held for ops in each]),
        np.concatenate([ops.waits_for for ops in each]),
        np.concatenate([ops.scale for ops in each]),
        each[0].pp,
        each[0].p2p,
    )
    return all_ops, np.array([bounds_of[count] for count in counts])


def row_cost_of(step: Step, cost: CostModel, state: State) -> RowCost:
    """The cost model per chunk and CP rank, and the limits of a row."""
    layout = step.layout
    share = cost.share_of_rank(layout)
    uniform = 0
    if step.policy.row_shape == "uniform":
        uniform = layout.aligned_row_tokens(int(state.tokens.max()))
    return RowCost(
        fixed=float(cost.fixed),
        per_token=float(cost.per_token * share),
        per_token_sq=float(cost.per_token_sq * share),
        per_sample=float(cost.per_sample * share),
        unit=layout.row_alignment,
        uniform_tokens=uniform,
        capacity=step.capacity,
        max_live=float(step.max_live or 0),
        fixed_rows=step.max_samples is not None,
    )
