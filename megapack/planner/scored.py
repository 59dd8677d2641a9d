"""`Way` and `Scored`: how a step is searched, and the boards that are simulated on the way."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from megapack.base.arrays import Floats, Ints
from megapack.cost.model import CostModel
from megapack.layout import Layout
from megapack.pipeline.simulator import Runner
from megapack.plan.order import deep_warmup
from megapack.planner.bins import heaviest_first
from megapack.planner.board import (
    Board,
    RowCost,
    add_up_rows,
    block_width,
    clone,
    empty_board,
    fill_rows,
)
from megapack.planner.clock import Clock, score_all, score_shared
from megapack.planner.draft import PADDING, Draft
from megapack.planner.fill import FillRule
from megapack.planner.improve import improve_blocks, improve_ranks
from megapack.planner.items import MOST_SQUARES, Items, row_sums
from megapack.planner.orders import OwnOrders, order_lines
from megapack.planner.step import UNLIMITED, Step


@dataclass(frozen=True)
class Way:
    """The items of a step, what is counted of them, and which freedoms their rows have."""

    items: Items
    num_levels: int = 1
    """Rows may lie over up to 2**(num_levels - 1) DP ranks."""
    own_order: bool = False
    """Stages choose their order; else they run in Megatron's."""
    is_real: bool = False
    """Rows are as long as they will be. Else what the samples of different items share counts as
    often as they have it, so that items can be moved one by one."""
    unit: int = 1
    """Cuts between pieces are at multiples of so many tokens."""

    @property
    def step(self) -> Step:
        """The step."""
        return self.items.step

    @property
    def layout(self) -> Layout:
        """The layout."""
        return self.items.step.layout

    @property
    def cost(self) -> CostModel:
        """What rows take."""
        return self.items.step.cost

    @property
    def runner(self) -> Runner:
        """The simulator of the step's ranks."""
        return self.step.runner

    @cached_property
    def work(self) -> Floats:
        """float64 [I]: seconds of each item's forward through one chunk on one rank, without
        `fixed`; tokens if all rows are as long as the longest one, so that tokens decide."""
        if self.step.policy.row_shape == "uniform":
            return self.items.aligned.astype(np.float64)
        return np.asarray(self.items.work * self.cost.share_of_rank(self.layout))

    @cached_property
    def order(self) -> Ints:
        """int64 [I]: the items in the order in which they are packed to targets."""
        return heaviest_first(self.items.aligned, self.work)

    @cached_property
    def rank_work(self) -> float:
        """Work of a mean rank."""
        return math.fsum(self.work.tolist()) / self.layout.dp

    @cached_property
    def cap(self) -> float:
        """Work of a full row with average samples."""
        tokens = int(self.items.aligned.sum())
        return self.rank_work * self.layout.dp * self.step.capacity / tokens

    @cached_property
    def row_cost(self) -> RowCost:
        """Costs and limits of rows."""
        return row_cost(self.step, self.num_levels)

    def blank(self, count: int) -> Board:
        """A board of M micro-batches per rank with no item in a row."""
        items = self.items
        sizes = [items.at_width(1 << level) for level in range(self.num_levels)]
        # What an item takes of the budget beyond its tokens costs nothing: squares make up for it.
        more = items.room - items.aligned
        per_square = self.cost.per_token_sq or math.inf
        paid = np.minimum(more * (self.cost.per_token / per_square), MOST_SQUARES)
        squares = items.image_squares - np.rint(paid)
        tokens = np.stack([size.aligned + more for size in sizes])
        tokens_sq = np.stack([size.aligned_sq + squares.astype(np.int64) for size in sizes])
        each = tokens, tokens_sq, items.item_samples, items.chain, items.kind
        return empty_board(self.row_cost, each, (self.layout.dp, count))

    def board_of(self, draft: Draft) -> Board:
        """A draft in arrays."""
        board = self.blank(draft.num_microbatches)
        padding = draft.num_rows
        for rank, rows in enumerate(draft.rank_rows):
            own = rows.copy()
            empty = np.flatnonzero(own == PADDING)
            own[empty] = padding + np.arange(empty.size)
            padding += empty.size
            board.rows[rank] = own
        board.level[: draft.num_rows] = np.frexp(draft.widths)[1] - 1
        spare = np.setdiff1d(np.arange(board.head.size), board.rows)
        board.spare[: spare.size] = spare
        board.num_spare[0] = spare.size
        fill_rows(board, draft.row_of)
        if self.is_real and self.step.prefixes is not None:
            tokens, tokens_sq, _ = draft.sizes
            board.tokens[: draft.num_rows] = tokens
            images = row_sums(draft.items.image_squares, draft.row_of, draft.num_rows)
            board.tokens_sq[: draft.num_rows] = tokens_sq + images
            add_up_rows(board)
        return board

    def score(self, board: Board, rule: FillRule | None = None) -> Scored:
        """Simulate all ranks of a board.

        Args:
            rule: how items choose rows over several ranks.
        """
        if self.step.policy.row_shape == "uniform":
            longest = self.layout.aligned_row_tokens(int(board.tokens.max()))
            board = board._replace(cost=self.row_cost._replace(uniform_tokens=longest))
            add_up_rows(board)
        own = self._own_orders(board) if self.own_order else None
        clock = Clock(self.runner.ops(board.rows.shape[1]), self.step.lockstep)
        score = score_all if self.num_levels == 1 else score_shared
        return Scored(self, board, clock, own, float(score(board, clock, own)), rule)

    def draft_of(self, board: Board) -> Draft:
        """The rows of a board."""
        used = board.num_items > 0
        number = np.where(used, np.cumsum(used) - 1, PADDING)
        return Draft(
            items=self.items,
            row_of=number[board.row_of],
            rank_rows=tuple(number[board.rows]),
            widths=np.int64(1) << board.level[used],
        )

    def score_draft(self, draft: Draft, rule: FillRule | None = None) -> Scored:
        """Simulate all ranks of a draft, which may be of other items."""
        way = self if draft.items is self.items else replace(self, items=draft.items)
        return way.score(way.board_of(draft), rule)

    def _own_orders(self, board: Board) -> OwnOrders:
        layout, step, cost = self.layout, self.step, self.cost
        split = step.policy.backward == "split" and not step.forward_only
        warmup = deep_warmup(layout.pp, layout.vpp, step.group_size or 1)
        if step.forward_only:
            warmup = np.full(layout.pp, board.rows.shape[1] * layout.vpp)
        return OwnOrders(
            chunk_weights=self.runner.weights,
            chunk_kinds=self.runner.kinds,
            pp=layout.pp,
            vpp=layout.vpp,
            group=step.group_size or 1,
            warmup=warmup,
            p2p=self.runner.p2p,
            cap=self._most_live(board),
            forward_only=step.forward_only,
            backward_ratio=float(cost.backward_ratio),
            weight_ratio=float(cost.weight_ratio) if split else 0.0,
            split=split,
        )

    def _most_live(self, board: Board) -> float:
        """Tokens that a stage may hold, each chunk counted whole: at most `Plan.live_cap`."""
        layout, step = self.layout, self.step
        if step.max_live is not None:
            return float(step.max_live)
        if step.forward_only:
            return math.inf
        count = board.rows.shape[1]
        in_flight = float(self.runner.order(count).peak_live(np.ones(count)).max())
        budget = step.budget or 0
        longest = layout.aligned_row_tokens(int((board.tokens >> board.level).max()))
        over = 0
        if step.policy.oversize == "alone":
            ends = self.items.end
            over = int(ends[ends > budget].max(initial=0)) * layout.vpp
        return in_flight * max(longest, budget) + over


@dataclass
class Scored:
    """A simulated board."""

    way: Way
    board: Board
    clock: Clock
    own: OwnOrders | None
    """Orders other than Megatron's; None: ranks run in Megatron's."""
    seconds: float
    """Simulated seconds of the step; inf if a rank breaks the cap on live tokens."""
    rule: FillRule | None = None
    """How items choose rows over several ranks; None if rows are on one rank each."""

    @property
    def count(self) -> int:
        """M."""
        return int(self.board.rows.shape[1])

    @property
    def num_ops(self) -> int:
        """Forwards and backwards of a rank."""
        return int(self.clock.ops.stage.size)

    def mean_work(self) -> float:
        """Seconds that the busiest stage of a rank works, the mean of all ranks.

        Moves of rows on one rank each change it by rows' alignment only.
        """
        board = self.board
        squares = board.cost.per_token_sq[board.level[board.rows]] * board.tokens_sq[board.rows]
        factors = board.cost.square_factors
        work = math.fsum(board.row_seconds[board.rows].ravel())
        works = work + (factors - 1.0) * math.fsum(squares.ravel())
        return self.way.runner.busiest_stage_seconds(works) / board.seconds.size

    def improve(self, budget: int, goal: float = 0.0) -> None:
        """Improve the board and its seconds.

        Args:
            budget: simulations of a rank; of rows over several ranks, of the step.
            goal: seconds that are fast enough.
        """
        if budget <= 0 or self.seconds == math.inf:
            return
        if self.rule is None:
            runner = self.way.runner
            passes = runner.busiest_stage_seconds(np.ones(len(runner.factors)))
            improve_ranks(self.board, self.clock, self.own, budget, passes)
        else:
            clones = clone(self.board), clone(self.board)
            improve_blocks(self.board, *clones, self.clock, self.own, self.rule, budget, goal)
        self.seconds = float(self.board.seconds.max())

    def affordable(self, budget: int, most_places: int) -> int:
        """The part of a budget with which moves of rows over several ranks look at no more than
        `most_places` for each simulation: a ruin looks at all places of the board.

        In 64 x 74 cells, rows over up to 64 ranks have 9,400 places; at most 4,000 leave 0.43 of
        the budget.
        """
        places = sum(self.board.rows.size >> level for level in range(self.way.num_levels))
        return min(budget, max(1, budget * most_places // places))

    def draft(self) -> Draft:
        """The board as a draft, with its orders."""
        draft = self.way.draft_of(self.board)
        if self.own is not None and not self.way.step.forward_only:
            draft = replace(draft, orders=self._orders(self.own))
        is_joined = self.own is not None and bool(self.board.level.any())
        if not is_joined and self.way.step.prefixes is None:
            draft = replace(draft, board_seconds=self.seconds)
        return draft

    def _orders(self, own: OwnOrders) -> tuple[tuple[str, ...], ...]:
        """What each rank's stages run."""
        dp = self.way.layout.dp
        orders: list[tuple[str, ...]] = []
        # Ranks that share rows run one order, and so do those in lockstep.
        while len(orders) < dp:
            rank = len(orders)
            width = dp if self.clock.lockstep else int(block_width(self.board, rank))
            orders += [order_lines(self.board, own, rank, rank + width)] * width
        return tuple(orders)


def real_seconds(draft: Draft) -> float:
    """Simulated seconds of a draft of rows on one rank each, in Megatron's order, by the cost
    model; inf if a rank breaks the cap on live tokens."""
    return Way(draft.items, is_real=True).score_draft(draft).seconds


def row_cost(step: Step, num_levels: int = 1) -> RowCost:
    """The cost model per chunk and GPU, and the limits of rows.

    Args:
        num_levels: rows over up to 2**(num_levels - 1) DP ranks.
    """
    cost = step.cost
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
