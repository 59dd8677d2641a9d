"""From a draft to the board of the compiled search, and back."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from megapack.base.arrays import Floats, Ints
from megapack.cost.model import CostModel
from megapack.layout import Layout
from megapack.pipeline.kernels import RankOps
from megapack.pipeline.simulator import Runner
from megapack.planner.annealing import anneal
from megapack.planner.board import Board, RowCost, add_up_rows, clone, empty_board, fill_rows
from megapack.planner.clock import Clock, score_all, score_shared
from megapack.planner.draft import PADDING, Draft
from megapack.planner.fill import FillRule
from megapack.planner.items import Items
from megapack.planner.moves import even_ranks, try_moves
from megapack.planner.own_orders import OwnOrders
from megapack.planner.step import UNLIMITED, Step

# As in planner/annealing.py: in 3 of 8 moves the items of some blocks of 1 to 8 ranks choose again,
# on average of 2 blocks, and about 64 items at most.
_RUINS = 3 / 8
_RUINED_BLOCKS = 2
_RUINED_LEVELS = 4
_RUINED_ITEMS = 64


@dataclass
class Scored:
    """A simulated draft."""

    draft: Draft
    board: Board
    """The draft in arrays."""
    clock: Clock
    own: OwnOrders | None
    """Orders other than Megatron's; None: ranks run in Megatron's."""
    seconds: float
    """Simulated seconds of the step; inf if a rank breaks the cap on live tokens."""
    rule: FillRule | None = None
    """How items choose rows over several ranks; None if rows are on one rank each."""

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of all ranks, with padding ones."""
        return self.board.rows.size

    def mean_work(self, runner: Runner) -> float:
        """Seconds that the busiest stage of a rank works, the mean of all ranks.

        Moves of rows on one rank each change it by rows' alignment only.
        """
        board = self.board
        rows = board.rows[board.rows >= 0]
        squares = board.cost.per_token_sq[board.level[rows]] * board.tokens_sq[rows]
        factors = board.cost.square_factors
        work = math.fsum(board.row_seconds[rows]) + (factors - 1.0) * math.fsum(squares)
        return runner.busiest_stage_seconds(work) / board.seconds.size

    def refine(self, runner: Runner, budget: int) -> int:
        """Improve the board and its seconds by up to `budget` simulations; returns those spent."""
        if self.rule is not None:
            self.anneal(budget, 0.0)
            return budget
        passes = runner.busiest_stage_seconds(np.ones(len(runner.factors)))
        any_order = runner.layout.pp == 1 and self.own is None
        if any_order and not self.clock.lockstep and not self.board.cost.fixed_rows:
            used = even_ranks(self.board, budget, passes)
        else:
            used = try_moves(self.board, self.clock, self.own, budget, passes)
        self.seconds = float(self.board.seconds.max())
        return int(used)

    def anneal(self, budget: int, goal: float) -> None:
        """Improve rows over several ranks by up to so many simulations of the step.

        Args:
            goal: seconds that are fast enough.
        """
        assert self.rule is not None
        clones = clone(self.board), clone(self.board)
        orders = orders_of(self.clock.ops) if self.own is None else self.own.ops
        args = (self.board, *clones, self.clock, self.own, orders, self.rule, budget, goal)
        self.seconds = float(anneal(*args))

    def affordable(self, budget: int, most_places: int) -> int:
        """The part of a budget with which moves of rows over several ranks try no more places for
        items than `most_places` for each simulation.

        8,192 items in 64 x 74 cells, rows over up to 64 ranks: 13 items of a move choose among
        9,400 places each, those of all widths, in 3 of 8 moves. These are 46,000 places; at most
        16,000 leave a third of the budget.
        """
        cells = self.board.rows.size
        levels = range(self.board.cost.unit.size)
        widths = [1 << level for level in levels[:_RUINED_LEVELS]]
        taken = _RUINED_BLOCKS * sum(widths) / len(widths)
        items = min(_RUINED_ITEMS, taken * self.board.row_of.size / cells)
        places = _RUINS * items * sum(cells >> level for level in levels)
        return min(budget, max(1, int(budget * most_places / places)))

    def moved(self) -> Draft:
        """The draft after the moves."""
        board = self.board
        used = board.num_items > 0
        number = np.where(used, np.cumsum(used) - 1, PADDING)
        is_wide = board.cost.unit.size > 1
        return replace(
            self.draft,
            row_of=number[board.row_of],
            rank_rows=tuple(number[board.rows]),
            widths=np.int64(1) << board.level[used] if is_wide else None,
            board_seconds=None,
        )


def score_shared_rows(
    draft: Draft, board: Board, runner: Runner, rule: FillRule, own: OwnOrders | None = None
) -> Scored:
    """Simulate all ranks of a board with rows over several of them.

    Args:
        draft: gives the items, M and G.
        own: orders other than Megatron's, with that of blocks of ranks that share rows.
    """
    clock = draft_clock(draft, runner)
    num_ops = clock.ops.stage.size if own is None else own.ops.shape[1]
    end = np.empty((num_ops, 1 if clock.lockstep else board.rows.shape[0]))
    seconds = float(score_shared(board, clock, own, end))
    return Scored(draft, board, clock, own, seconds, rule)


def score_draft(
    draft: Draft,
    cost: CostModel,
    runner: Runner,
    own: OwnOrders | None = None,
    *,
    is_real: bool = False,
) -> Scored:
    """Simulate every rank of a draft under a cost model: dp evaluations.

    Args:
        own: orders other than Megatron's.
        is_real: rows are as long as they will be. Else what the samples of different items share
            counts as often as they have it, so that items can be moved one by one.
    """
    board = filled_board(draft, cost, is_real=is_real)
    clock = draft_clock(draft, runner)
    return Scored(draft, board, clock, own, float(score_all(board, clock, own)))


def real_seconds(draft: Draft) -> float:
    """Simulated seconds of a draft of rows on one rank each, in Megatron's order, by the cost
    model; inf if a rank breaks the cap on live tokens."""
    cost = draft.items.step.real_cost
    return score_draft(draft, cost, draft.items.step.runner(cost), is_real=True).seconds


def filled_board(
    draft: Draft, cost: CostModel, *, num_levels: int = 1, is_real: bool = False
) -> Board:
    """A draft in arrays.

    Args:
        num_levels: rows may lie over up to 2**(num_levels - 1) DP ranks.
        is_real: see `score_draft`.
    """
    items = draft.items
    costs = row_cost(items.step, cost, num_levels)
    board = blank_board(items, costs, draft.num_microbatches)
    padding = draft.num_rows
    for rank, rows in enumerate(draft.rank_rows):
        own = rows.copy()
        empty = np.flatnonzero(own == PADDING)
        own[empty] = padding + np.arange(empty.size)
        padding += empty.size
        board.rows[rank] = own
    if draft.widths is not None:
        board.level[: draft.num_rows] = np.frexp(draft.widths)[1] - 1
        spare = np.setdiff1d(np.arange(board.head.size), board.rows)
        board.spare[: spare.size] = spare
        board.num_spare[0] = spare.size
    fill_rows(board, draft.row_of)
    if is_real and items.step.prefixes is not None:
        tokens, tokens_sq, _ = draft.sizes
        board.tokens[: draft.num_rows] = tokens
        board.tokens_sq[: draft.num_rows] = tokens_sq
        add_up_rows(board)
    if items.step.policy.row_shape == "uniform":
        longest = items.step.layout.aligned_row_tokens(int(board.tokens.max()))
        board = board._replace(cost=costs._replace(uniform_tokens=longest))
        add_up_rows(board)
    return board


def blank_board(items: Items, costs: RowCost, count: int) -> Board:
    """A board of M micro-batches per rank with no item in a row."""
    sizes = [items.at_width(1 << level) for level in range(costs.unit.size)]
    tokens, tokens_sq = sizes[0].aligned[None], sizes[0].aligned_sq[None]
    if len(sizes) > 1:
        tokens = np.stack([size.aligned for size in sizes])
        tokens_sq = np.stack([size.aligned_sq for size in sizes])
    begin, end = items.begin, items.end
    if items.num_pieces:
        # Shifts of cuts change them, of this board alone.
        tokens, tokens_sq, begin, end = (a.copy() for a in (tokens, tokens_sq, begin, end))
    pieces = (begin, end, items.chain)
    shape = items.step.layout.dp, count
    return empty_board(costs, tokens, tokens_sq, items.item_samples, pieces, shape)


def draft_clock(draft: Draft, runner: Runner) -> Clock:
    """Megatron's operations of a draft's ranks."""
    return Clock(runner.ops(draft.num_microbatches), draft.items.step.lockstep)


def row_cost(step: Step, cost: CostModel, num_levels: int = 1) -> RowCost:
    """The cost model per chunk and GPU, and the limits of rows.

    Args:
        num_levels: rows over up to 2**(num_levels - 1) DP ranks.
    """
    rates, widths, unit = _rates(step.layout, cost, num_levels)
    # Where items over the budget do not go over several ranks, they may be alone in their rows.
    widens = step.policy.context_parallel == "dynamic"
    alone = step.budget if widens and step.budget is not None else UNLIMITED
    return RowCost(
        *rates,
        square_factors=np.array(cost.distinct_factors),
        unit=unit,
        capacity=step.capacity * widths // unit * unit,
        alone=alone * widths // unit * unit,
        lengths=np.array(step.layout.row_lengths, dtype=np.int64),
        uniform_tokens=0,
        max_live=float(step.max_live or 0),
        fixed_rows=step.max_samples is not None,
        allows_padding=step.policy.unreachable == "pad",
    )


@lru_cache(maxsize=64)
def _rates(
    layout: Layout, cost: CostModel, num_levels: int
) -> tuple[tuple[Floats, Floats, Floats, Floats], Ints, Ints]:
    """Fixed seconds and seconds per token, squared token and sample, width and row alignment of
    each level."""
    widths = layout.widths[:num_levels]
    # Contiguous, as with one level: kernels would be compiled once more for other arrays.
    fixed, factor = np.array([cost.over_ranks(width) for width in widths]).T.copy()
    share = np.array([cost.share_of_rank(layout, width) for width in widths])
    rates = (fixed, cost.per_token * factor * share, cost.per_token_sq * share)
    unit = np.array([layout.over(width).row_alignment for width in widths])
    return (*rates, cost.per_sample * share), np.array(widths), unit


def orders_of(ops: RankOps) -> Ints:
    """Megatron's operations, as in `OwnOrders.ops`; chunks and kinds are left out."""
    none = np.zeros_like(ops.stage)
    return np.stack([ops.stage, ops.microbatch, none, none, ops.waits_for], axis=1)[None]
