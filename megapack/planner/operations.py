"""The search for steps whose stages run other operations than Megatron's schedules.

    the drafts of whole samples           -> their seconds with W's in the waits; moves
    M, the longest piece, chains' place   -> drafts of pieces; the best few improved by moves
    the best                              -> the order of each rank's operations

Under context_parallel="dynamic" this is done for rows on one rank each and for rows over several.
The draft of whole samples in Megatron's order is one of the results that are compared, so no plan
is slower than it in the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np

from megapack.base.arrays import Ints
from megapack.planner.board import Board, RowCost, microbatch_tokens
from megapack.planner.clock import OwnOrders, order_lines, room_to_run, run_ranks, set_order
from megapack.planner.counts import shapes_of
from megapack.planner.draft import Draft
from megapack.planner.fill import FillRule, fill_rule
from megapack.planner.items import Items
from megapack.planner.pieces import (
    CutItems,
    chain_cells,
    cut_items,
    family_rows,
    fill_around,
    is_alone,
    item_seconds,
    may_cut,
    pack_around,
)
from megapack.planner.scored import (
    Scored,
    filled_board,
    row_cost,
    score_draft,
    score_shared_rows,
)
from megapack.planner.step import spread_counts

# All constants of this module were chosen by hand. docs/planner.md measures the whole search.

# Values of M are tried for pieces up to twice the closed form for equal micro-batches.
_MAX_GROWTH = 6
_MANY_ROWS = 40
# The longest piece, in parts of a mean row's work.
_STRETCHES = (1.0, 1.5)
# Places of chains in a rank's order.
_PLACES = (0.0, 0.25, 0.5, 0.75, 1.0)
# Simulations of ranks for drafts of pieces, as a multiple of the policy's evaluations: 4,096, which
# are 1,024 drafts on dp=4.
_DRAFTS_GROWTH = 2
# Drafts that have both pieces and rows over several ranks: those that try 2**23 cells for items in
# all, and 16 at least. 2,048 items in 8 x 32 cells are 2**19.
_WIDE_PLACES = 2**23
_WIDE_DRAFTS = 16
# At least so many where samples hardly fit under the cap on live tokens.
_TIGHT_DRAFTS = 128
# Simulations for moves, the same: 8,192 of up to 512 operations, fewer of longer orders. Half of
# them are for the draft of whole samples and the best drafts of pieces, each of another M, and half
# for the best of them.
_MOVES_GROWTH = 4
_OPERATIONS = 512
_CONTENDERS = 4
# How much later than a wait a W may end, see `OwnOrders.patience`: while drafts are compared, and
# for the order of each rank at last.
_PATIENCE = 0.75
_LAST_PATIENCES = (0.0, 0.25, 0.5, 1.0)
# Relative gain that makes a draft better than the fixed one: more than rounding in fp64.
_LEAST_GAIN = 1e-9


_Choice = tuple[tuple[int, int], float | None, float, bool]
"""G and M, the longest piece in mean rows (see `_cut`), the chains' place, and whether other items
may lie over several ranks."""


def plan_operations(
    items: Items, fixed: Draft | None, wide: Draft | None, *, is_tight: bool = False
) -> Draft | None:
    """The best draft with an order of its own; None if none is faster than `fixed`.

    Args:
        fixed: the best draft in Megatron's order, of rows on one DP rank each; None if there is
            none that the policy allows.
        wide: the best one with rows over several ranks, the same.
        is_tight: samples hardly fit under the cap on live tokens. Stages put forwards off that
            would break it, which fills fewer waits, and more drafts are made.
    """
    search = _OperationSearch(items, fixed, wide, is_tight)
    best = search.run()
    if best is None:
        return None
    if search.whole is not None and best.seconds >= search.whole.seconds * (1 - _LEAST_GAIN):
        return None
    return search.finished(best)


class _OperationSearch:
    def __init__(
        self, items: Items, fixed: Draft | None, wide: Draft | None, is_tight: bool
    ) -> None:
        self.items = items
        self.step = items.step
        self.layout = self.step.layout
        self.policy = self.step.policy
        self.cost = self.step.real_cost
        self.runner = self.step.runner(self.cost)
        self.split = self.policy.backward == "split" and not self.step.forward_only
        self.total = math.fsum(item_seconds(items).tolist())
        self.is_tight = is_tight
        # Cuts are at multiples of it. Pieces of whole units of a row add no padding to the sample.
        self.unit = self.layout.row_alignment if is_tight else self.layout.sample_alignment
        # Rows may lie over so many ranks as those of the wide draft, or else over any.
        self.costs: RowCost | None = None
        if self.policy.context_parallel == "dynamic" and self.step.budget is not None:
            widths = self.policy.widths(self.layout)
            widest = widths[-1] if wide is None else int(wide.row_widths.max())
            self.costs = row_cost(self.step, self.cost, widest.bit_length())
        # What stages hold in Megatron's order, which is enough for W's; inf if there is no draft.
        self.held = math.inf
        self.whole: Scored | None = None
        if fixed is not None:
            self.whole = self._scored(fixed, split=False)
            self.held = self._held(self.whole)
        self.wide = wide

    def run(self) -> Scored | None:
        """The best candidate; None if none respects the cap on live tokens."""
        narrow = [] if self.whole is None else [self._scored(self.whole.draft, self.split)]
        wide = [] if self.wide is None or not self.split else [self._scored_wide(self.wide)]
        # The fastest draft of pieces of each M, without rows over several ranks and with some.
        cut: tuple[dict[int, Scored], dict[int, Scored]] = ({}, {})
        for draft in self._cut_drafts() if may_cut(self.items) else ():
            best = cut[draft.rule is not None]
            count = draft.board.rows.shape[1]
            if count not in best or draft.seconds < best[count].seconds:
                best[count] = draft
        # Rows over several ranks have moves of their own, so they take none from the others.
        found = [self._best(narrow, cut[False]), self._best(wide, cut[True])]
        return min(filter(None, found), key=lambda c: c.seconds, default=None)

    def _best(self, whole: list[Scored], by_count: dict[int, Scored]) -> Scored | None:
        """The best of some candidates after moves.

        Args:
            whole: the draft of whole samples, if there is one.
            by_count: a draft of pieces for each M.
        """
        cut = sorted(by_count.values(), key=lambda c: c.seconds)[:_CONTENDERS]
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

    def finished(self, found: Scored) -> Draft:
        """A draft after its moves, with its orders."""
        draft = found.moved()
        items = draft.items
        if items.num_pieces:
            board = found.board
            real_end = np.minimum(board.end, items.sample_lengths[items.first_samples])
            is_cut = items.is_piece & (items.item_samples == 1)
            lengths = np.where(is_cut, real_end - board.begin, items.lengths)
            items = replace(
                items,
                lengths=lengths,
                aligned=board.item_tokens[0],
                aligned_sq=board.item_tokens_sq[0],
                begin=board.begin,
                end=board.end,
            )
            draft = replace(draft, items=items)
        # A draft of pieces has orders even if no sample was worth a cut.
        is_whole = self.whole is not None and found.draft.items is self.whole.draft.items
        if self.step.forward_only or (is_whole and not self.split):
            return draft
        return replace(draft, orders=self._orders(found))

    def _orders(self, found: Scored) -> tuple[tuple[str, ...], ...]:
        """What each rank's stages run, with the patience that is best for the rank."""
        own = found.own
        assert own is not None
        orders: list[tuple[str, ...]] = []
        # Ranks that share rows are simulated together.
        together = self.layout.dp if found.rule is not None and not found.clock.lockstep else 1
        for rank in range(0, self.layout.dp, together):
            order = 0 if own.is_common else rank
            if found.rule is None:
                # A move that was not kept may have left its own.
                set_order(found.board, own, rank)
            ops = own.ops[order, : own.num_ops[order]]
            best: tuple[float, Ints, Ints] | None = None
            for patience in (_PATIENCE, *_LAST_PATIENCES) if self.split else (_PATIENCE,):
                ran, num_ran, end = room_to_run(own, together)
                args = (found.board, found.clock, own, rank, patience, ran, num_ran, end)
                seconds = float(run_ranks(*args))
                if best is None or seconds < best[0]:
                    best = seconds, ran, num_ran
            assert best is not None
            shape = (together, own.pp, -1)
            pairs = zip(best[1].reshape(shape), best[2].reshape(shape[:2]), strict=True)
            orders += [order_lines(ops, *pair) for pair in pairs]
        return tuple(orders)

    def _cut_drafts(self) -> Iterator[Scored]:
        """Yield drafts of pieces."""
        dp = self.layout.dp
        pairs = shapes_of(self.step, self._counts)
        limit = max(1, _DRAFTS_GROWTH * self.policy.search // dp)
        if self.is_tight:
            limit = max(limit, _TIGHT_DRAFTS)
        choices: list[_Choice] = _some(list(product(pairs, _STRETCHES, _PLACES, (False,))), limit)
        if self._mixes():
            beside = list(product(pairs, (_STRETCHES[0], None), _PLACES, (True,)))
            places = self.items.num_items * dp * max(count for _, count in pairs)
            choices += _some(beside, min(limit, max(_WIDE_PLACES // places, _WIDE_DRAFTS)))
        made: dict[tuple[int, int, float | None, bool], CutItems | None] = {}
        for (group, count), stretch, place, is_wide in choices:
            key = (group, count, stretch, is_wide)
            if key not in made:
                made[key] = self._cut(*key)
            cut = made[key]
            if cut is None or (not cut.sizes and place != _PLACES[0]):
                continue
            own_group = group if self.layout.vpp > 1 else None
            cells = chain_cells(cut, count, own_group, place)
            if cells is None:
                continue
            if is_wide:
                if cut.sizes:
                    yield from self._cut_beside_wide_rows(cut, cells, count, own_group)
            elif not self._must_widen(cut):
                draft = pack_around(cut, cells, count, own_group)
                if draft is not None:
                    yield self._scored(draft, self.split)

    def _mixes(self) -> bool:
        """Whether pieces and rows over several ranks may be in one step: families are in pieces,
        samples are that no width holds, or sets go over several ranks."""
        if self.costs is None:
            return False
        if self.items.num_pieces:
            return True
        tokens = self.items.aligned
        held = np.where(is_alone(self.items), self.costs.alone[-1], self.costs.alone[0])
        return bool((tokens > held).any())

    def _must_widen(self, cut: CutItems) -> bool:
        """Whether a whole item must go over several ranks."""
        if self.costs is None:
            return False
        return bool((cut.items.aligned[: cut.num_whole] > self.costs.alone[0]).any())

    def _cut_beside_wide_rows(
        self, cut: CutItems, cells: Ints, count: int, group: int | None
    ) -> Iterator[Scored]:
        """Yield the draft of these pieces and rows over several ranks, if all items find rows."""
        assert self.costs is not None
        found = fill_around(cut, cells, self.costs, count)
        if found is not None:
            yield self._scored_board(Draft.blank(cut.items, count, group), *found)

    def _cut(self, group: int, count: int, stretch: float | None, is_wide: bool) -> CutItems | None:
        """The items with pieces of up to `stretch` mean rows of M; None: only samples that fit into
        no row are cut, where `is_wide` into no row of several ranks."""
        longest = (stretch or 0.0) * self.total / (self.layout.dp * count)
        if self.step.forward_only or self.layout.pp == 1:
            # No stage waits for a backward, so only samples over the budget are cut.
            longest = 0.0
        room = self.step.capacity
        if stretch is None and is_wide:
            assert self.costs is not None
            room = int(self.costs.alone[-1])
        most = count if self.layout.vpp == 1 else min(group, count)
        return cut_items(self.items, count, longest, most, room, self.unit)

    def _counts(self, group: int) -> list[int]:
        """Legal values of M to try, smaller ones closer together."""
        layout = self.layout
        capacity = self.step.capacity
        tokens = self.items.aligned
        pieces = np.where(tokens > capacity, -(-tokens // capacity), 0)
        # The rows of a sample over the budget hold nothing else, and are on one rank.
        held = int(np.where(pieces > 0, pieces * capacity, tokens).sum())
        rows = max(-(-held // (capacity * layout.dp)), int(pieces.max()), family_rows(self.items))
        least = self.step.legal_count(rows, group)
        top = least + group if layout.pp > 1 else least + 1
        if self.cost.fixed > 0:
            equal = self.total / layout.dp * (layout.pp - 1) / (layout.vpp * self.cost.fixed)
            most = max(_MAX_GROWTH * least, _MANY_ROWS)
            top = max(top, int(min(2 * math.sqrt(equal), float(most))))
        else:
            top = max(top, _MAX_GROWTH * least)
        wanted = spread_counts(least, top)
        return list(dict.fromkeys(self.step.legal_count(m, group) for m in wanted))

    def _scored(self, draft: Draft, split: bool) -> Scored:
        """A simulated draft of rows on one rank each in an order of its own."""
        own = self._own_orders(draft, split)
        return score_draft(draft, self.cost, self.runner, own, is_real=True)

    def _scored_wide(self, draft: Draft) -> Scored:
        """The simulated draft with rows over several ranks in an order of its own."""
        assert self.costs is not None
        board = filled_board(draft, self.cost, num_levels=self.costs.unit.size, is_real=True)
        work = item_seconds(draft.items)
        rule = fill_rule(draft.items, self.costs, work)
        assert rule is not None
        count = board.rows.shape[1]
        targets = np.full(count, self.total / (self.layout.dp * count) + self.cost.fixed)
        return self._scored_board(draft, board, rule._replace(targets=targets))

    def _scored_board(self, draft: Draft, board: Board, rule: FillRule) -> Scored:
        own = self._own_orders(draft, self.split)._replace(is_common=True)
        return score_shared_rows(draft, board, self.runner, rule, own)

    def _own_orders(self, draft: Draft, split: bool) -> OwnOrders:
        layout = self.layout
        counts = [rows.size for rows in draft.rank_rows]
        num_ops = (1 if self.step.forward_only else 2) * max(counts) * layout.num_chunks
        return OwnOrders(
            chunk_weights=self.runner.weights,
            chunk_kinds=self.runner.kinds,
            pp=layout.pp,
            vpp=layout.vpp,
            group=draft.group_size or 1,
            p2p=self.runner.p2p,
            cap=self._cap(draft),
            heeds_cap=self.is_tight,
            alignment=self.unit,
            least_piece=self.step.least_piece,
            forward_only=self.step.forward_only,
            backward_ratio=float(self.cost.backward_ratio),
            weight_ratio=float(self.cost.weight_ratio) if split else 0.0,
            split=split,
            is_common=self.step.lockstep,
            patience=_PATIENCE,
            ops=np.empty((layout.dp, num_ops, 5), dtype=np.int64),
            num_ops=np.zeros(layout.dp, dtype=np.int64),
            turned=np.zeros((layout.dp, max(counts)), dtype=np.int64),
        )

    def _cap(self, draft: Draft) -> float:
        """Tokens that a stage may hold, each chunk counted whole.

        At most `Plan.live_cap`, and without a cap in the policy no more than the draft of whole
        samples holds in Megatron's order: W's that wait longer gain little (docs/planner.md).
        """
        layout = self.layout
        if self.step.max_live is not None:
            return float(self.step.max_live)
        if self.step.forward_only:
            return math.inf
        count = max(rows.size for rows in draft.rank_rows)
        order = self.runner.order(count, draft.group_size or 1)
        in_flight = float(order.peak_live(np.ones(count)).max())
        budget = self.step.budget or 0
        # Under context_parallel="dynamic" no row puts more tokens on a rank than the budget.
        is_wide = draft.widths is not None or not draft.row_of.size
        longest = budget if is_wide else max(int(draft.row_tokens().max()), layout.row_alignment)
        over = 0
        if self.policy.oversize == "alone":
            ends = draft.items.end
            over = int(ends[ends > budget].max(initial=0)) * layout.vpp
        cap = in_flight * max(layout.aligned_row_tokens(longest), budget) + over
        return cap if is_wide else min(cap, self.held)

    def _held(self, found: Scored) -> float:
        """The most tokens that a stage holds in Megatron's order, each chunk counted whole.

        Ranks in lockstep run one order, as if each had the longest of their rows.
        """
        ranks = [
            np.array([float(microbatch_tokens(found.board, rank, k)) for k in range(count)])
            for rank, count in enumerate(found.board.counts.tolist())
        ]
        if self.step.lockstep:
            ranks = [np.maximum.reduce(ranks)]
        group = found.draft.group_size
        peaks = [self.runner.order(held.size, group).peak_live(held) for held in ranks]
        return float(max(peak.max() for peak in peaks))

    def _improve(self, found: Scored, budget: int) -> None:
        """Improve a draft by moves, if its rows may change."""
        counts = found.board.counts
        movable = self.step.prefixes is None and self.step.max_samples is None
        movable = movable and not self.step.lockstep and int(counts.min()) == counts.max()
        if not movable or self.policy.row_shape == "uniform" or found.seconds == math.inf:
            return
        assert found.own is not None
        num_ops = found.own.ops.shape[1]
        budget = min(budget, budget * _OPERATIONS // num_ops)
        if found.rule is not None:
            # A simulation of the step is one of each rank.
            budget //= self.layout.dp
        if budget > 0:
            found.refine(self.runner, budget)


def _some(choices: list[_Choice], limit: int) -> list[_Choice]:
    """At most so many choices, evenly spread."""
    every = max(1, -(-len(choices) // limit))
    return choices[every // 2 :: every]
