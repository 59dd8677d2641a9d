"""From a draft to the arrays of the compiled search, and back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megapack.base.arrays import Ints
from megapack.cost.model import TOKENS, CostModel
from megapack.pipeline.kernels import RankOps
from megapack.pipeline.simulator import Runner
from megapack.planner.problem import PADDING, StepDraft, StepProblem, row_sums
from megapack.planner.refine import refine
from megapack.planner.state import RowCost, State, fill_rows, score_all

# Capacity of a row without a budget: no int64 sum of a step's tokens reaches it.
_UNLIMITED = 2**62


@dataclass
class Scored:
    """A simulated draft."""

    draft: StepDraft
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
        rows = zip(self.state.rows, self.state.counts.tolist(), strict=True)
        self.draft = StepDraft(
            row_of=self.state.row_of,
            rank_rows=tuple(rank_rows[:count].copy() for rank_rows, count in rows),
            group_size=self.draft.group_size,
        )
        return int(used)


def score_draft(
    problem: StepProblem, cost: CostModel, runner: Runner, draft: StepDraft, lockstep: bool
) -> Scored:
    """Simulate every rank of a draft: dp evaluations."""
    state = draft_state(problem, draft)
    ops, bounds = _all_ops(runner, draft)
    row_cost = row_cost_of(problem, cost, state)
    seconds = float(score_all(row_cost, state, ops, bounds, lockstep))
    return Scored(draft, state, row_cost, ops, bounds, seconds)


def drafted_seconds(problem: StepProblem, draft: StepDraft) -> float:
    """Simulated seconds of a draft's step by the cost model, whatever the policy balances.

    The search counts what the samples of an item share. Here rows are as long as they will be: the
    items of a row share, too. inf if a rank breaks the cap on live tokens.
    """
    cost = problem.cost or TOKENS
    lockstep = problem.layout.ep_spans_dp
    runner = Runner(problem.layout, cost, problem.forward_only)
    state = draft_state(problem, draft)
    num_rows = state.tokens.size
    saved, saved_sq = problem.saved(draft.row_of, num_rows)
    state.tokens[:] -= saved - row_sums(problem.shared, draft.row_of, num_rows)
    state.tokens_sq[:] -= saved_sq - row_sums(problem.shared_sq, draft.row_of, num_rows)
    ops, bounds = _all_ops(runner, draft)
    return float(score_all(row_cost_of(problem, cost, state), state, ops, bounds, lockstep))


def draft_state(problem: StepProblem, draft: StepDraft) -> State:
    """The arrays of a draft, with seconds that are not simulated yet."""
    num_rows = int(draft.row_of.max()) + 1
    counts = np.array([rows.size for rows in draft.rank_rows])
    rows = np.full((counts.size, int(counts.max())), PADDING, dtype=np.int64)
    for rank, rank_rows in enumerate(draft.rank_rows):
        rows[rank, : rank_rows.size] = rank_rows
    state = State(
        item_tokens=problem.aligned,
        item_tokens_sq=problem.aligned_sq,
        item_samples=problem.item_samples,
        row_of=draft.row_of.copy(),
        next=np.empty(problem.num_items, dtype=np.int64),
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


def _all_ops(runner: Runner, draft: StepDraft) -> tuple[RankOps, Ints]:
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


def row_cost_of(problem: StepProblem, cost: CostModel, state: State) -> RowCost:
    """The cost model per chunk and CP rank, and the limits of a row."""
    layout = problem.layout
    policy = problem.policy
    share = cost.share_of_rank(layout)
    uniform = 0
    if policy.row_shape == "uniform":
        uniform = layout.aligned_row_tokens(int(state.tokens.max()))
    live = 0.0
    if policy.max_live_tokens_per_gpu is not None:
        live = float(policy.max_live_tokens_per_gpu * layout.cp * layout.vpp)
    return RowCost(
        fixed=float(cost.fixed),
        per_token=float(cost.per_token * share),
        per_token_sq=float(cost.per_token_sq * share),
        per_sample=float(cost.per_sample * share),
        unit=layout.row_alignment,
        uniform_tokens=uniform,
        capacity=problem.capacity if problem.capacity >= 0 else _UNLIMITED,
        max_live=live,
        fixed_rows=problem.max_samples is not None,
    )
