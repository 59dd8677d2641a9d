"""Drafts as the arrays that the compiled search works on, and back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megapack.base.arrays import Ints
from megapack.cost.model import CostModel
from megapack.pipeline.kernels import RankOps
from megapack.pipeline.simulator import Runner
from megapack.planner.problem import PADDING, StepDraft, StepProblem
from megapack.planner.refine import refine
from megapack.planner.state import RowCost, State, score_all

_UNCAPPED = 2**62


@dataclass
class Scored:
    """A draft that was simulated."""

    draft: StepDraft
    state: State
    cost: RowCost
    ops: RankOps
    bounds: Ints
    seconds: float
    """Simulated seconds of the step; inf where a cap is broken."""

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of all ranks, padding counted."""
        return int(self.state.counts.sum())

    def refine(self, runner: Runner, budget: int, lockstep: bool) -> int:
        """Improve it in place by `budget` simulations; returns those spent."""
        passes = runner.busiest_stage_seconds(np.ones(1))
        used = refine(self.cost, self.state, self.ops, self.bounds, lockstep, budget, passes)
        self.seconds = float(self.state.seconds.max())
        rows = zip(self.state.rows, self.state.counts.tolist(), strict=True)
        self.draft = StepDraft(
            row_of=self.state.row_of,
            rank_rows=tuple(places[:count].copy() for places, count in rows),
            group_size=self.draft.group_size,
        )
        return int(used)


def score_draft(
    problem: StepProblem, cost: CostModel, runner: Runner, draft: StepDraft, lockstep: bool
) -> Scored:
    """Simulate every rank of a draft: dp evaluations."""
    state = _state(problem, draft)
    ops, bounds = _all_ops(runner, draft)
    row_cost = _row_cost(problem, cost, state)
    seconds = float(score_all(row_cost, state, ops, bounds, lockstep))
    return Scored(draft, state, row_cost, ops, bounds, seconds)


def _state(problem: StepProblem, draft: StepDraft) -> State:
    row_of = draft.row_of.copy()
    num = np.bincount(row_of)
    items = (problem.aligned, problem.aligned_sq, problem.num)
    tokens, tokens_sq, samples = (_row_sums(part, row_of, num.size) for part in items)
    # Items of a row follow each other in `order`; each points to the one after it.
    order = np.argsort(row_of, kind="stable")
    after = np.full(row_of.size, -1, dtype=np.int64)
    same_row = row_of[order[:-1]] == row_of[order[1:]]
    after[order[:-1][same_row]] = order[1:][same_row]
    head = order[np.cumsum(num) - num]
    counts = np.array([rows.size for rows in draft.rank_rows])
    rows = np.full((counts.size, int(counts.max())), PADDING, dtype=np.int64)
    for rank, places in enumerate(draft.rank_rows):
        rows[rank, : places.size] = places
    seconds = np.zeros(counts.size)
    in_rows = (tokens, tokens_sq, samples, num)
    return State(*items, row_of, after, head, *in_rows, rows, counts, seconds)


def _row_sums(part: Ints, row_of: Ints, num_rows: int) -> Ints:
    total = np.zeros(num_rows, dtype=np.int64)
    np.add.at(total, row_of, part)
    return total


def _all_ops(runner: Runner, draft: StepDraft) -> tuple[RankOps, Ints]:
    """The operations of each count that occurs, one after the other, and each rank's bounds."""
    counts = [rows.size for rows in draft.rank_rows]
    distinct = sorted(set(counts))
    each = [runner.ops(count, draft.group_size) for count in distinct]
    if len(each) == 1:
        return each[0], np.array([[0, each[0].stage.size]] * len(counts))
    ends = np.cumsum([ops.stage.size for ops in each]).tolist()
    span = {
        count: (end - ops.stage.size, end)
        for count, ops, end in zip(distinct, each, ends, strict=True)
    }
    all_ops = RankOps(
        np.concatenate([ops.stage for ops in each]),
        np.concatenate([ops.microbatch for ops in each]),
        np.concatenate([ops.backward for ops in each]),
        np.concatenate([ops.waits_for for ops in each]),
        np.concatenate([ops.scale for ops in each]),
        each[0].pp,
        each[0].p2p,
    )
    return all_ops, np.array([span[count] for count in counts])


def _row_cost(problem: StepProblem, cost: CostModel, state: State) -> RowCost:
    layout, policy = problem.layout, problem.policy
    share = 1.0 / (layout.num_chunks * layout.cp)
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
        capacity=problem.capacity if problem.capacity >= 0 else _UNCAPPED,
        max_live=live,
        fixed_rows=problem.max_samples is not None,
    )
