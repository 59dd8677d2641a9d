"""The search for steps whose stages run other operations than Megatron's schedules.

    the draft of whole samples            -> its seconds with W's in the waits; improved by moves
    M, the longest piece, chains' place   -> drafts of pieces; the best few improved by moves
    the best                              -> the order of each rank's operations

The draft of whole samples in Megatron's order is one of the results that are compared, so no plan
is slower than it in the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import numpy as np

from megapack.cost.model import TOKENS
from megapack.pipeline.simulator import Runner
from megapack.planner.counts import group_sizes
from megapack.planner.piece_moves import (
    Pieces,
    Pipeline,
    RankOrders,
    Rows,
    move_rows,
    run_rank,
    score_rows,
)
from megapack.planner.pieces import CutProblem, cut_problem, item_work, may_cut, place_chains
from megapack.planner.problem import ItemPieces, StepDraft, StepProblem, row_sums
from megapack.planner.scored import draft_state, row_cost_of
from megapack.planner.state import row_tokens
from megapack.planner.weight_fill import FillRules, order_lines

# All constants of this module were chosen by hand. docs/planner.md measures the whole search.

# Values of M that are tried for pieces, up to twice the closed form for equal micro-batches: from 4
# to 40 they are 4, 5, 6, 8, 11, 15, 20, 26, 32, 40.
_MAX_COUNTS = 10
_MAX_GROWTH = 6
_MANY_ROWS = 40
# The longest piece, in parts of a mean row's work.
_STRETCHES = (1.0, 1.5)
# Places of chains in a rank's order.
_PLACES = (0.0, 0.25, 0.5, 0.75, 1.0)
# Simulations of ranks for drafts of pieces, as a multiple of the policy's evaluations: 4,096, which
# are 1,024 drafts on dp=4.
_DRAFTS_GROWTH = 2
# Simulations for moves, the same: 8,192 of up to 512 operations, fewer of longer orders. Half of
# them are for the draft of whole samples and the best drafts of pieces, each of another M, and half
# for the best of them.
_MOVES_GROWTH = 4
_OPERATIONS = 512
_CONTENDERS = 4
# How much later than a wait a W may end, see `FillRules.patience`: while drafts are compared, and
# for the order of each rank at last.
_PATIENCE = 0.75
_LAST_PATIENCES = (0.0, 0.25, 0.5, 1.0)
# Relative gain that makes a draft better than the fixed one: more than rounding in fp64.
_LEAST_GAIN = 1e-9


class FoundOperations(NamedTuple):
    """A draft whose stages run an order of their own."""

    problem: StepProblem
    """What it is a draft of: the given problem, or one with pieces."""
    draft: StepDraft
    seconds: float
    """Simulated seconds of the step."""


@dataclass
class _Candidate:
    """A draft in arrays that moves change."""

    problem: StepProblem
    draft: StepDraft
    rows: Rows
    seconds: float


def plan_operations(
    problem: StepProblem, fixed: StepDraft | None, budget: int
) -> FoundOperations | None:
    """The best draft with an order of its own; None if none is faster than `fixed`.

    Args:
        fixed: the best draft in Megatron's order, of rows on one DP rank each; None if there is
            none that the policy allows.
        budget: padded tokens that a row of one DP rank may hold; the capacity is less where a cap
            on live tokens lowers it. -1 without a budget.
    """
    search = _OperationSearch(problem, fixed, budget)
    best = search.run()
    if best is None:
        return None
    if search.whole is not None and best.seconds >= search.whole.seconds * (1 - _LEAST_GAIN):
        return None
    return search.finished(best)


class _OperationSearch:
    def __init__(self, problem: StepProblem, fixed: StepDraft | None, budget: int) -> None:
        self.problem = problem
        self.layout = problem.layout
        self.policy = problem.policy
        self.cost = problem.cost or TOKENS
        self.budget = budget
        self.runner = Runner(self.layout, self.cost, problem.forward_only)
        self.split = self.policy.backward == "split" and not problem.forward_only
        self.cuts = self.policy.split_samples == "auto" and may_cut(problem)
        self.total = math.fsum(item_work(problem, self.cost).tolist())
        # What stages hold in Megatron's order, which is enough for W's; inf if there is no draft.
        self.held = math.inf
        self.whole: _Candidate | None = None
        if fixed is not None:
            self.whole = self._scored(problem, fixed, split=False)
            self.held = self._held(self.whole)

    def run(self) -> _Candidate | None:
        """The best candidate; None if none respects the cap on live tokens."""
        whole = []
        if self.whole is not None:
            whole.append(self._scored(self.problem, self.whole.draft, self.split))
        cut = self._best_cuts() if self.cuts else []
        moves = _MOVES_GROWTH * self.policy.search
        # The draft of whole samples gets as many as the others together.
        for candidates in (whole, cut):
            for candidate in candidates:
                self._improve(candidate, moves // 2 // len(candidates))
        best = min(whole + cut, key=lambda c: c.seconds, default=None)
        if best is None or best.seconds == math.inf:
            return None
        self._improve(best, moves - moves // 2)
        return best

    def finished(self, candidate: _Candidate) -> FoundOperations:
        """A candidate's draft with its orders."""
        state = candidate.rows.state
        rows = zip(state.rows, state.counts.tolist(), strict=True)
        draft = StepDraft(
            row_of=state.row_of,
            rank_rows=tuple(rank_rows[:count].copy() for rank_rows, count in rows),
            group_size=candidate.draft.group_size,
        )
        problem = candidate.problem
        if problem.pieces is not None:
            pieces = ItemPieces(*candidate.rows.pieces[:3])
            is_piece = pieces.chain >= 0
            first = np.cumsum(problem.item_samples) - problem.item_samples
            real_end = np.minimum(pieces.end, problem.sample_lengths[first])
            problem = replace(
                problem,
                lengths=np.where(is_piece, real_end - pieces.start, problem.lengths),
                aligned=state.item_tokens,
                aligned_sq=state.item_tokens_sq,
                pieces=pieces,
            )
        if problem.forward_only or (problem.pieces is None and not self.split):
            return FoundOperations(problem, draft, candidate.seconds)
        seconds, orders = self._orders(candidate)
        return FoundOperations(problem, replace(draft, orders=orders), seconds)

    def _orders(self, candidate: _Candidate) -> tuple[float, tuple[tuple[str, ...], ...]]:
        """The step's seconds, and what each rank's stages run, with the patience that is best for
        the rank."""
        rows = candidate.rows
        pp = self.layout.pp
        orders = []
        slowest = 0.0
        for rank in range(self.layout.dp):
            ops = rows.orders.ops[rank, : rows.orders.num_ops[rank]]
            best: tuple[float, tuple[str, ...]] = (math.inf, ())
            for patience in (_PATIENCE, *_LAST_PATIENCES) if self.split else (_PATIENCE,):
                rules = rows.pipeline.rules._replace(patience=patience)
                ran = np.empty((pp, 2 * ops.shape[0] // pp), dtype=np.int64)
                num_ran = np.empty(pp, dtype=np.int64)
                seconds = float(run_rank(rows, rank, rules, ran, num_ran))
                if seconds < best[0]:
                    best = (seconds, order_lines(ops, ran, num_ran))
            orders.append(best[1])
            slowest = max(slowest, best[0])
        return slowest, tuple(orders)

    def _best_cuts(self) -> list[_Candidate]:
        """The fastest drafts of pieces, each of another M."""
        best: dict[int, _Candidate] = {}
        for candidate in self._cut_drafts():
            count = candidate.draft.rank_rows[0].size
            if count not in best or candidate.seconds < best[count].seconds:
                best[count] = candidate
        return sorted(best.values(), key=lambda c: c.seconds)[:_CONTENDERS]

    def _cut_drafts(self) -> Iterator[_Candidate]:
        """Yield drafts of pieces."""
        dp = self.layout.dp
        shapes = [
            (group, count)
            for group in group_sizes(self.layout, self.policy)
            for count in self._counts(group)
        ]
        choices = list(product(shapes, _STRETCHES, _PLACES))
        limit = max(1, _DRAFTS_GROWTH * self.policy.search // dp)
        every = -(-len(choices) // limit)
        made: dict[tuple[int, int, float], CutProblem | None] = {}
        for (group, count), stretch, place in choices[every // 2 :: every]:
            key = (group, count, stretch)
            if key not in made:
                made[key] = self._cut(group, count, stretch)
            cut = made[key]
            if cut is None or (not cut.sizes and place != _PLACES[0]):
                continue
            own_group = group if self.layout.vpp > 1 else None
            draft = place_chains(cut, count, own_group, place)
            if draft is not None:
                yield self._scored(cut.problem, draft, self.split)

    def _cut(self, group: int, count: int, stretch: float) -> CutProblem | None:
        """The problem with pieces of up to `stretch` mean rows of M."""
        longest = stretch * self.total / (self.layout.dp * count)
        if self.problem.forward_only or self.layout.pp == 1:
            # No stage waits for a backward, so only samples over the budget are cut.
            longest = 0.0
        most = count if self.layout.vpp == 1 else min(group, count)
        return cut_problem(self.problem, self.cost, count, longest, most)

    def _counts(self, group: int) -> list[int]:
        """Legal values of M to try, smaller ones closer together."""
        layout = self.layout
        rule = self.policy.count_rule
        capacity = self.problem.capacity
        tokens = self.problem.aligned
        pieces = np.where(tokens > capacity, -(-tokens // capacity), 0)
        # The rows of a sample over the budget hold nothing else, and are on one rank.
        held = int(np.where(pieces > 0, pieces * capacity, tokens).sum())
        rows = max(-(-held // (capacity * layout.dp)), int(pieces.max()))
        least = layout.next_legal_count(rows, rule, group)
        top = least + group if layout.pp > 1 else least + 1
        if self.cost.fixed > 0:
            equal = self.total / layout.dp * (layout.pp - 1) / (layout.vpp * self.cost.fixed)
            most = max(_MAX_GROWTH * least, _MANY_ROWS)
            top = max(top, int(min(2 * math.sqrt(equal), float(most))))
        else:
            top = max(top, _MAX_GROWTH * least)
        last = _MAX_COUNTS - 1
        wanted = [least + (top - least) * k * k // (last * last) for k in range(last + 1)]
        return list(dict.fromkeys(layout.next_legal_count(m, rule, group) for m in wanted))

    def _scored(self, problem: StepProblem, draft: StepDraft, split: bool) -> _Candidate:
        """A simulated draft in arrays."""
        state = draft_state(problem, draft)
        num_rows = state.tokens.size
        if problem.prefixes is not None:
            saved, saved_sq = problem.saved(draft.row_of, num_rows)
            state.tokens[:] -= saved - row_sums(problem.shared, draft.row_of, num_rows)
            state.tokens_sq[:] -= saved_sq - row_sums(problem.shared_sq, draft.row_of, num_rows)
        # Moves change the items of a piece and of the next one, of this draft alone.
        state = state._replace(
            item_tokens=state.item_tokens.copy(), item_tokens_sq=state.item_tokens_sq.copy()
        )
        layout = self.layout
        counts = state.counts
        group = draft.group_size or 1
        passes = 1 if problem.forward_only else 2
        num_ops = passes * counts * layout.num_chunks
        rules = FillRules(
            chunk_weights=self.runner.weights,
            pp=layout.pp,
            p2p=self.runner.p2p,
            cap=self._cap(problem, int(counts.max()), group, int(state.tokens.max())),
            split=split,
            patience=_PATIENCE,
        )
        pipeline = Pipeline(
            rules=rules,
            vpp=layout.vpp,
            group=group,
            forward_only=problem.forward_only,
            lockstep=layout.ep_spans_dp,
            alignment=layout.sample_alignment,
            backward_ratio=float(self.cost.backward_ratio),
            weight_ratio=float(self.cost.weight_ratio) if split else 0.0,
        )
        orders = RankOrders(
            ops=np.empty((layout.dp, int(num_ops.max()), 5), dtype=np.int64),
            num_ops=np.zeros(layout.dp, dtype=np.int64),
            turned=np.zeros((layout.dp, int(counts.max())), dtype=np.int64),
        )
        cost = row_cost_of(problem, self.cost, state)
        rows = Rows(cost, pipeline, state, _pieces_of(problem, draft, num_rows), orders)
        return _Candidate(problem, draft, rows, float(score_rows(rows)))

    def _cap(self, problem: StepProblem, count: int, group: int, longest: int) -> float:
        """Tokens that a stage may hold, each chunk counted whole.

        At most `Plan.live_cap`, and without a cap in the policy no more than the draft of whole
        samples holds in Megatron's order: W's that wait longer gain little (docs/planner.md).
        """
        layout = self.layout
        if problem.forward_only:
            return math.inf
        live = self.policy.max_live_tokens_per_gpu
        if live is not None:
            return float(live * layout.cp * layout.vpp)
        order = self.runner.order(count, group)
        in_flight = float(order.peak_live(np.ones(count)).max())
        longest = max(longest, layout.row_alignment)
        over = 0
        if problem.pieces is not None and self.policy.oversize == "alone":
            ends = problem.pieces.end[problem.pieces.chain >= 0]
            over = int(ends[ends > self.budget].max(initial=0)) * layout.vpp
        cap = in_flight * max(layout.aligned_row_tokens(longest), self.budget) + over
        return min(cap, self.held)

    def _held(self, candidate: _Candidate) -> float:
        """The most tokens that a stage holds in Megatron's order, each chunk counted whole.

        Ranks in lockstep run one order, as if each had the longest of their rows.
        """
        state = candidate.rows.state
        ranks = []
        for rows, count in zip(state.rows, state.counts.tolist(), strict=True):
            tokens = [int(state.tokens[row]) if row >= 0 else 0 for row in rows[:count].tolist()]
            ranks.append(np.array([float(row_tokens(candidate.rows.cost, n)) for n in tokens]))
        if self.layout.ep_spans_dp:
            ranks = [np.maximum.reduce(ranks)]
        group = candidate.draft.group_size
        orders = [self.runner.order(held.size, group) for held in ranks]
        peaks = [order.peak_live(held) for order, held in zip(orders, ranks, strict=True)]
        return float(max(peak.max() for peak in peaks))

    def _improve(self, candidate: _Candidate, budget: int) -> None:
        """Improve a candidate by moves, if its rows may change."""
        problem = candidate.problem
        counts = candidate.rows.state.counts
        movable = problem.prefixes is None and problem.max_samples is None
        movable = movable and not self.layout.ep_spans_dp and int(counts.min()) == counts.max()
        if not movable or self.policy.row_shape == "uniform" or candidate.seconds == math.inf:
            return
        num_ops = candidate.rows.orders.ops.shape[1]
        budget = min(budget, budget * _OPERATIONS // num_ops)
        if budget > 0:
            passes = self.runner.busiest_stage_seconds(np.ones(1))
            move_rows(candidate.rows, budget, passes)
            candidate.seconds = float(candidate.rows.state.seconds.max())


def _pieces_of(problem: StepProblem, draft: StepDraft, num_rows: int) -> Pieces:
    chain_of = np.full(num_rows, -1, dtype=np.int64)
    piece_of = np.full(num_rows, -1, dtype=np.int64)
    if problem.pieces is None:
        whole = np.full(problem.num_items, -1, dtype=np.int64)
        start = np.zeros(problem.num_items, dtype=np.int64)
        return Pieces(start, problem.aligned.copy(), whole, chain_of, piece_of)
    start, end, chain = problem.pieces
    items = np.flatnonzero(chain >= 0)
    chain_of[draft.row_of[items]] = chain[items]
    piece_of[draft.row_of[items]] = items
    return Pieces(start.copy(), end.copy(), chain, chain_of, piece_of)
