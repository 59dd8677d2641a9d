"""From a draft to the board of the compiled search, and back."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from megapack.base.arrays import Ints
from megapack.cost.model import CostModel
from megapack.pipeline.kernels import RankOps
from megapack.pipeline.simulator import Runner
from megapack.planner.board import Board, RowCost, fill_rows
from megapack.planner.clock import Clock, OwnOrders, score_all
from megapack.planner.draft import PADDING, Draft
from megapack.planner.even import even_ranks
from megapack.planner.moves import try_moves
from megapack.planner.step import Step

# What ranks in Megatron's order have in place of an order of their own.
_MEGATRON = OwnOrders(
    used=False,
    chunk_weights=np.zeros(0),
    pp=1,
    vpp=1,
    group=1,
    p2p=0.0,
    cap=0.0,
    alignment=1,
    forward_only=False,
    backward_ratio=0.0,
    weight_ratio=0.0,
    split=False,
    patience=0.0,
    ops=np.zeros((0, 0, 5), dtype=np.int64),
    num_ops=np.zeros(0, dtype=np.int64),
    turned=np.zeros((0, 0), dtype=np.int64),
)


@dataclass
class Scored:
    """A simulated draft."""

    draft: Draft
    board: Board
    """The draft in arrays."""
    clock: Clock
    seconds: float
    """Simulated seconds of the step; inf if a rank breaks the cap on live tokens."""

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of all ranks, with padding ones."""
        return int(self.board.counts.sum())

    def refine(self, runner: Runner, budget: int) -> int:
        """Improve the board and its seconds by up to `budget` simulations; returns those spent."""
        passes = runner.busiest_stage_seconds(np.ones(1))
        any_order = runner.layout.pp == 1 and not self.clock.own.used
        if any_order and not self.clock.lockstep and not self.board.cost.fixed_rows:
            used = even_ranks(self.board, budget, passes)
        else:
            used = try_moves(self.board, self.clock, budget, passes)
        self.seconds = float(self.board.seconds.max())
        return int(used)

    def moved(self) -> Draft:
        """The draft after the moves."""
        board = self.board
        rows = zip(board.rows, board.counts.tolist(), strict=True)
        rank_rows = tuple(own[:count].copy() for own, count in rows)
        return replace(self.draft, row_of=board.row_of, rank_rows=rank_rows)


def score_draft(
    draft: Draft,
    cost: CostModel,
    runner: Runner,
    own: OwnOrders = _MEGATRON,
    *,
    is_real: bool = False,
) -> Scored:
    """Simulate every rank of a draft under a cost model: dp evaluations.

    Args:
        own: an order other than Megatron's.
        is_real: rows are as long as they will be. Else what the samples of different items share
            counts as often as they have it, so that items can be moved one by one.
    """
    board = _board(draft, cost, is_real)
    clock = Clock(*_all_ops(runner, draft), draft.items.step.lockstep, own)
    return Scored(draft, board, clock, float(score_all(board, clock)))


def real_seconds(draft: Draft) -> float:
    """Simulated seconds of a draft of rows on one rank each, in Megatron's order, by the cost
    model; inf if a rank breaks the cap on live tokens."""
    cost = draft.items.step.real_cost
    return score_draft(draft, cost, draft.items.step.runner(cost), is_real=True).seconds


def _board(draft: Draft, cost: CostModel, is_real: bool) -> Board:
    items = draft.items
    num_items, num_rows = items.num_items, draft.num_rows
    counts = np.array([rows.size for rows in draft.rank_rows])
    rows = np.full((counts.size, int(counts.max())), PADDING, dtype=np.int64)
    for rank, rank_rows in enumerate(draft.rank_rows):
        rows[rank, : rank_rows.size] = rank_rows
    item_tokens, item_tokens_sq = items.aligned, items.aligned_sq
    begin = np.zeros(num_items, dtype=np.int64)
    end = chain = np.full(num_items, -1, dtype=np.int64)
    if items.pieces is not None:
        # Shifts of cuts change them, of this draft alone.
        item_tokens, item_tokens_sq = item_tokens.copy(), item_tokens_sq.copy()
        begin, end, chain = (column.copy() for column in items.pieces)
    board = Board(
        cost=_row_cost(items.step, cost),
        item_tokens=item_tokens,
        item_tokens_sq=item_tokens_sq,
        item_samples=items.item_samples,
        begin=begin,
        end=end,
        chain=chain,
        row_of=draft.row_of.copy(),
        next=np.empty(num_items, dtype=np.int64),
        head=np.full(num_rows, -1, dtype=np.int64),
        tokens=np.zeros(num_rows, dtype=np.int64),
        tokens_sq=np.zeros(num_rows, dtype=np.int64),
        num_samples=np.zeros(num_rows, dtype=np.int64),
        num_items=np.zeros(num_rows, dtype=np.int64),
        piece_of=np.full(num_rows, -1, dtype=np.int64),
        rows=rows,
        counts=counts,
        seconds=np.zeros(counts.size),
    )
    fill_rows(board)
    if is_real and items.step.prefixes is not None:
        saved, saved_sq = draft.saved
        board.tokens[:] -= saved
        board.tokens_sq[:] -= saved_sq
    if items.step.policy.row_shape != "uniform":
        return board
    longest = items.step.layout.aligned_row_tokens(int(board.tokens.max()))
    return board._replace(cost=board.cost._replace(uniform_tokens=longest))


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


def _row_cost(step: Step, cost: CostModel) -> RowCost:
    """The cost model per chunk and CP rank, and the limits of a row."""
    share = cost.share_of_rank(step.layout)
    return RowCost(
        fixed=float(cost.fixed),
        per_token=float(cost.per_token * share),
        per_token_sq=float(cost.per_token_sq * share),
        per_sample=float(cost.per_sample * share),
        unit=step.layout.row_alignment,
        uniform_tokens=0,
        capacity=step.capacity,
        max_live=float(step.max_live or 0),
        fixed_rows=step.max_samples is not None,
    )
