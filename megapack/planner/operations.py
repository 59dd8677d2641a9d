"""The search for steps whose stages run other operations than Megatron's schedules.

    the drafts of whole samples           -> their seconds in orders of their own
    M, the longest piece, chains' place   -> drafts packed anew, then more close to the best
    the best few of both                  -> moves; a draft that is far behind gets none
    the best                              -> the order of each rank's operations

Under context_parallel="dynamic" this is done for rows on one rank each and for rows over several.
The draft of whole samples in Megatron's order is one of the results that are compared, so no plan
is slower than it in the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from megapack.base.arrays import Ints
from megapack.plan.order import deep_warmup, megatron_warmup
from megapack.planner.board import Board, RowCost, block_width
from megapack.planner.draft import Draft
from megapack.planner.fill import FillRule, fill_rule
from megapack.planner.items import Items
from megapack.planner.own_orders import OwnOrders, RanksOfOneOrder, set_order
from megapack.planner.pieces import (
    CutItems,
    chain_cells,
    cut_items,
    family_rows,
    fill_around,
    is_alone,
    item_seconds,
    pack_around,
)
from megapack.planner.scored import (
    Scored,
    filled_board,
    row_cost,
    score_draft,
    score_shared_rows,
)
from megapack.planner.step import UNLIMITED, spread_counts

# All constants of this module were chosen by hand. docs/planner.md measures the whole search.

# Values of M are tried for pieces up to twice the closed form for equal micro-batches.
_MAX_GROWTH = 6
_MANY_ROWS = 40
# The longest piece, in parts of a mean row's work.
_STRETCHES = (1.0, 1.5)
# The most work of a chain on a rank, in parts of a mean rank's. With 128 samples on dp=8 one sample
# may have the work of a rank; in pieces on one rank it would leave that rank nothing beside it.
_SHARES = (0.15, 0.3, 0.6)
# Places of chains in a rank's order.
_PLACES = (0.0, 0.25, 0.5, 0.75, 1.0)
# Twice, drafts are made that are close to the best three: with values of M halfway to those tried
# before, other longest pieces, and the next places.
_CLOSER_ROUNDS = 2
_CLOSER_TO = 3
_CLOSER_STRETCHES = (1.0, 1.25, 1.5)
_CLOSER_PLACES = (-0.25, 0.0, 0.25)
# In each round this part of the limit at most: 128 drafts of 1,024 on dp=4.
_CLOSER_PART = 8
# Simulations of ranks for drafts of pieces, as a multiple of the policy's evaluations: 4,096, which
# are 1,024 drafts on dp=4.
_DRAFTS_GROWTH = 2
# Drafts that have both pieces and rows over several ranks, of each kind: those that try 2**23
# cells for items in all, and 16 at least. 2,048 items in 8 x 32 cells are 2**19.
_WIDE_PLACES = 2**23
_WIDE_DRAFTS = 16
# In each round this part of them, of drafts close to the best three.
_CLOSER_WIDE_PART = 2
# At least so many where samples hardly fit under the cap on live tokens.
_TIGHT_DRAFTS = 128
# Simulations for moves, the same: 8,192 of up to 512 operations, fewer of longer orders. At first
# each kind of draft gets half of them: the one that is given, those of whole samples packed anew,
# those with pieces, and the same with rows over several ranks. At last the best of each kind gets
# half of them, if it is near the fastest.
_MOVES_GROWTH = 4
_OPERATIONS = 512
_CONTENDERS = 4
# Places that moves try for items of rows over several ranks, for each simulation: fewer than in the
# search for these rows, which has been there before.
_MOST_PLACES = 4000
# Contenders' values of M differ by this part from those of faster ones: from 20 these are 18 or
# less, or 22 or more.
_APART = 0.1
# A draft that is so much slower than the fastest gets no moves. In 40 steps of 128 samples, moves
# made 36 drafts with rows over several ranks up to 2.4 % faster at first, and 76 drafts up to 1.5 %
# at last. With 4 to 16 items per rank, moves of rows on one rank each made up for more than 10 %:
# these get theirs in any case.
_REACH = 0.1
_MANY_ITEMS = 32
_WIDE_REACH = 0.05
_LAST_REACH = 0.02
# A step that takes so little more than the mean work of its ranks is not improved.
_NEAR = 0.003
# Relative gain that makes a draft better than the fixed one: more than rounding in fp64.
_LEAST_GAIN = 1e-9


class _Choice(NamedTuple):
    """How samples are cut, and where their pieces lie."""

    num_microbatches: int
    """M."""
    stretch: float | None
    """The longest piece in mean rows of M; see `_OperationSearch._cut`."""
    place: float
    """Of chains in a rank's order, from 0 to 1."""
    widens: bool
    """Whether whole items may lie over more ranks than they need."""
    share: float = math.inf
    """The most work of a chain on a rank, in mean ranks: a longer chain lies over several."""

    @property
    def is_wide(self) -> bool:
        """Whether rows may lie over several ranks."""
        return self.widens or self.share < math.inf


# The fastest draft of each M, and how its samples are cut.
_ByCount = dict[int, tuple[Scored, _Choice]]


def plan_operations(
    items: Items, fixed: Draft | None, wide: Draft | None, *, is_tight: bool = False
) -> Draft | None:
    """The best draft with an order of its own; None if none is faster than `fixed`.

    Args:
        fixed: the best draft in Megatron's order, of rows on one DP rank each; None if there is
            none that the policy allows.
        wide: the best one with rows over several ranks, the same.
        is_tight: samples hardly fit under the cap on live tokens, so more drafts are made, of
            whole units of a row.
    """
    search = _OperationSearch(items, fixed, wide, is_tight)
    best = search.run()
    if best is None:
        return None
    if best.seconds >= search.fixed_seconds * (1 - _LEAST_GAIN):
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
            wanted = self._heaviest() / _SHARES[0]
            widest = max(widest, *(w for w in widths if w < 2 * max(wanted, 1.0)))
            self.costs = row_cost(self.step, self.cost, widest.bit_length())
        self.fixed = fixed
        # Its seconds in Megatron's order.
        self.fixed_seconds = math.inf
        if fixed is not None:
            self.fixed_seconds = score_draft(fixed, self.cost, self.runner, is_real=True).seconds
        self.wide = wide
        # Whatever the place, the samples are cut in the same way.
        self.cuts: dict[_Choice, CutItems | None] = {}
        # Shapes of the drafts that were made: choices may cut samples alike.
        self.made: set[tuple[Any, ...]] = set()

    def run(self) -> Scored | None:
        """The best candidate; None if none respects the cap on live tokens."""
        narrow = [] if self.fixed is None else [self._scored(self.fixed)]
        wide = [] if self.wide is None or not self.split else [self._scored_wide(self.wide)]
        uncut, cut, cut_wide = self._new_drafts() if self._may_pack() else ([], [], [])
        moves = _MOVES_GROWTH * self.policy.search
        finalists = []
        every = (*narrow, *uncut, *cut, *wide, *cut_wide)
        fastest = min((candidate.seconds for candidate in every), default=math.inf)
        is_many = self.items.num_items >= _MANY_ITEMS * self.layout.dp
        # Each kind gets the moves that it would get alone, so that none makes a plan slower.
        groups = [(narrow, uncut), ([], cut)] if uncut else [(narrow, cut)]
        for given, made in (*groups, (wide, cut_wide)):
            for candidates in (given, made):
                for candidate in candidates:
                    reach = _WIDE_REACH
                    if candidate.rule is None:
                        reach = _REACH if is_many else math.inf
                    if candidate.seconds <= fastest * (1 + reach):
                        self._improve(candidate, moves // 2 // len(candidates))
                    fastest = min(fastest, candidate.seconds)
            if given or made:
                finalists.append(min(given + made, key=lambda c: c.seconds))
        for candidate in sorted(finalists, key=lambda c: c.seconds):
            if candidate.seconds <= fastest * (1 + _LAST_REACH):
                self._improve(candidate, moves - moves // 2)
            fastest = min(fastest, candidate.seconds)
        best = min(finalists, key=lambda c: c.seconds, default=None)
        return None if best is None or best.seconds == math.inf else best

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
        seconds = found.seconds
        if not self.step.forward_only:
            orders, seconds = self._orders(found)
            draft = replace(draft, orders=orders)
        # Rows that share prefixes are shorter than the board counts.
        return replace(draft, board_seconds=seconds) if self.step.prefixes is None else draft

    def _orders(self, found: Scored) -> tuple[tuple[tuple[str, ...], ...], float]:
        """What each rank's stages run, in the order that is best for the rank, and the step's
        seconds."""
        dp, lockstep, own = self.layout.dp, found.clock.lockstep, found.own
        assert own is not None
        warmups = self._warmups(found.draft.num_microbatches)
        orders: list[tuple[str, ...]] = []
        slowest = 0.0
        # Ranks that share rows are simulated together; those in lockstep are all alike.
        while len(orders) < (1 if lockstep else dp):
            rank = len(orders)
            width = 1 if lockstep else int(block_width(found.board, rank))
            ranks = RanksOfOneOrder(found.board, own, rank, width, lockstep)
            seconds, lines = ranks.best_order(warmups)
            slowest = max(slowest, seconds)
            orders += lines
        return tuple(orders * dp if lockstep else orders), slowest

    def _new_drafts(self) -> tuple[list[Scored], list[Scored], list[Scored]]:
        """The fastest drafts that are packed anew, each of another M: those of whole samples, those
        with pieces, both with rows on one rank each, and those with rows over several."""
        uncut: _ByCount = {}
        cut: _ByCount = {}
        wide: _ByCount = {}
        tried = set()
        for choice in self._choices():
            tried.add(choice)
            narrow = uncut if choice.stretch is None else cut
            self._try(choice, wide if choice.is_wide else narrow)
        limit = self._most_drafts() // _CLOSER_PART
        wide_limit = min(limit, self._most_wide_drafts(max(wide, default=1)) // _CLOSER_WIDE_PART)
        for _ in range(_CLOSER_ROUNDS):
            for found, most in ((uncut, limit), (cut, limit), (wide, wide_limit)):
                closer = [choice for choice in self._closer_choices(found) if choice not in tried]
                for choice in _some(closer, most):
                    tried.add(choice)
                    self._try(choice, found)
        return _contenders(uncut), _contenders(cut), _contenders(wide)

    def _may_pack(self) -> bool:
        """Whether items may be in other rows than those of the drafts of whole samples."""
        if self.step.cuts_samples or not self.split:
            return self.step.cuts_samples
        is_uniform = self.policy.row_shape == "uniform"
        return self.layout.pp > 1 and self.step.budget is not None and not is_uniform

    def _most_drafts(self) -> int:
        limit = max(1, _DRAFTS_GROWTH * self.policy.search // self.layout.dp)
        return max(limit, _TIGHT_DRAFTS) if self.is_tight else limit

    def _choices(self) -> list[_Choice]:
        """All values of M, the longest piece and the chains' place, as far as the limit allows."""
        counts = self._counts()
        limit = self._most_drafts()
        whole = [_Choice(count, None, 0.0, False) for count in counts]
        if not self.step.cuts_samples:
            return _some(whole, limit)
        # Where samples over the budget must be cut, those choices are left out.
        choices = _some(whole, limit) if self.split and self.fixed is not None else []
        choices += _some(_every_choice(counts, _STRETCHES, False, (math.inf,)), limit)
        limit = self._most_wide_drafts(max(counts))
        if self._mixes():
            stretches = (_STRETCHES[0], None)
            choices += _some(_every_choice(counts, stretches, True, (math.inf,)), limit)
        shares = [share for share in _SHARES if share < self._heaviest()]
        if self._widest > 1 and shares:
            # A sample over the budget has fewer pieces over several ranks.
            counts = self._counts(self._widest)
            choices += _some(_every_choice(counts, _STRETCHES, False, shares), limit)
        return choices

    def _most_wide_drafts(self, count: int) -> int:
        """Drafts with both pieces and rows over several ranks, of up to so many micro-batches."""
        places = self.items.num_items * self.layout.dp * count
        return min(self._most_drafts(), max(_WIDE_PLACES // places, _WIDE_DRAFTS))

    @property
    def _widest(self) -> int:
        """The most ranks that a row may lie over."""
        return 1 if self.costs is None else 1 << (self.costs.unit.size - 1)

    def _heaviest(self) -> float:
        """The work of the sample that has most, in mean ranks."""
        single = item_seconds(self.items)[is_alone(self.items)]
        return float(single.max(initial=0.0)) * self.layout.dp / self.total if self.total else 0.0

    def _closer_choices(self, found: _ByCount) -> list[_Choice]:
        """Choices that are close to those of the fastest drafts."""
        legal = [pair for pair in found.values() if pair[0].seconds < math.inf]
        ranked = sorted(legal, key=lambda pair: pair[0].seconds)
        closer: dict[_Choice, None] = {}
        for _, best in ranked[:_CLOSER_TO]:
            own = best.num_microbatches
            below = max((count for count in found if count < own), default=own)
            above = min((count for count in found if count > own), default=own)
            for other in (below, own, above):
                count = self.step.legal_count((own + other) // 2)
                steps: Iterable[tuple[float | None, float]] = [(None, 0.0)]
                if best.stretch is not None:
                    steps = product(_CLOSER_STRETCHES, _CLOSER_PLACES)
                for stretch, step in steps:
                    place = min(max(best.place + step, 0.0), 1.0)
                    closer[best._replace(num_microbatches=count, stretch=stretch, place=place)] = (
                        None
                    )
        return list(closer)

    def _try(self, choice: _Choice, found: _ByCount) -> None:
        """Keep the draft of a choice if it is the fastest of its M."""
        draft = self._cut_draft(choice)
        if draft is None:
            return
        best = found.get(choice.num_microbatches)
        if best is None or draft.seconds < best[0].seconds:
            found[choice.num_microbatches] = draft, choice

    def _cut_draft(self, choice: _Choice) -> Scored | None:
        """The draft of a choice; None if items find no rows, or another choice has the same one."""
        cut = self._cut(choice)
        if cut is None:
            return None
        count = choice.num_microbatches
        place = choice.place if cut.sizes else 0.0
        shape = count, place, choice.widens, cut.sizes, cut.widths
        # Without wide rows the draft is that of a choice on one rank each.
        is_narrow = not cut.sizes or (max(cut.widths) == 1 and not choice.widens)
        if shape in self.made or (choice.is_wide and is_narrow):
            return None
        self.made.add(shape)
        cells = chain_cells(cut, count, choice.place)
        if cells is None:
            return None
        if choice.is_wide:
            assert self.costs is not None
            found = fill_around(cut, cells, self.costs, count, widens=choice.widens)
            blank = Draft.blank(cut.items, count)
            return None if found is None else self._scored_board(blank, *found)
        if self._must_widen(cut):
            return None
        draft = pack_around(cut, cells, count)
        return None if draft is None else self._scored(draft)

    def _mixes(self) -> bool:
        """Whether pieces and rows over several ranks may be in one step: families are in pieces,
        samples are that no width holds, or sets go over several ranks."""
        if self.costs is None or not self.step.cuts_samples:
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

    def _cut(self, choice: _Choice) -> CutItems | None:
        """The items with pieces of up to `stretch` mean rows of M; None: only samples that fit into
        no row are cut, where `widens` into no row of several ranks."""
        key = choice._replace(place=0.0)
        if key not in self.cuts:
            self.cuts[key] = self._newly_cut(key)
        return self.cuts[key]

    def _newly_cut(self, choice: _Choice) -> CutItems | None:
        count = choice.num_microbatches
        longest = (choice.stretch or 0.0) * self.total / (self.layout.dp * count)
        if self.step.forward_only or self.layout.pp == 1:
            # No stage waits for a backward, so only samples over the budget are cut.
            longest = 0.0
        room = self.step.capacity if self.step.cuts_samples else UNLIMITED
        if choice.stretch is None and choice.widens:
            assert self.costs is not None
            room = int(self.costs.alone[-1])
        most = count if self.layout.vpp == 1 else min(self.layout.group_size, count)
        share = choice.share * self.total / self.layout.dp
        return cut_items(self.items, count, longest, most, room, self.unit, share, self._widest)

    def _counts(self, width: int = 1) -> list[int]:
        """Legal values of M to try, smaller ones closer together.

        Args:
            width: DP ranks that pieces may lie over.
        """
        layout = self.layout
        capacity = self.step.capacity
        tokens = self.items.aligned
        pieces = np.where(tokens > capacity, -(-tokens // (width * capacity)), 0)
        if not self.step.cuts_samples:
            pieces = np.minimum(pieces, 1)
        # The rows of a sample over the budget hold nothing else.
        held = int(np.where(pieces > 0, pieces * width * capacity, tokens).sum())
        rows = max(-(-held // (capacity * layout.dp)), int(pieces.max()), family_rows(self.items))
        least = self.step.legal_count(rows)
        top = least + layout.group_size if layout.pp > 1 else least + 1
        if self.cost.fixed > 0:
            equal = self.total / layout.dp * (layout.pp - 1) / (layout.vpp * self.cost.fixed)
            most = max(_MAX_GROWTH * least, _MANY_ROWS)
            top = max(top, int(min(2 * math.sqrt(equal), float(most))))
        else:
            top = max(top, _MAX_GROWTH * least)
        wanted = spread_counts(least, top)
        return list(dict.fromkeys(self.step.legal_count(m) for m in wanted))

    def _scored(self, draft: Draft) -> Scored:
        """A simulated draft of rows on one rank each in an order of its own."""
        own = self._own_orders(draft)
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
        found = []
        # Ranks that share no row choose for themselves.
        for warmup in self._warmups(draft.num_microbatches)[: 2 if board.level.any() else 1]:
            own = self._own_orders(draft)
            dp = self.layout.dp
            set_order(board, own, warmup, dp, 0, dp)
            found.append(score_shared_rows(draft, board, self.runner, rule, own))
        return min(found, key=lambda scored: scored.seconds)

    def _warmups(self, count: int) -> list[Ints]:
        """Forwards that the stages may run ahead, the most first. Where several ranks run one
        order, fewer may be better."""
        layout = self.layout
        shape = layout.pp, layout.vpp, self.step.group_size or 1
        if self.step.forward_only:
            return [np.full(layout.pp, count * layout.vpp)]
        same = layout.vpp > 1 or layout.pp == 1
        return [deep_warmup(*shape)] if same else [deep_warmup(*shape), megatron_warmup(*shape)]

    def _own_orders(self, draft: Draft) -> OwnOrders:
        layout = self.layout
        count = draft.num_microbatches
        num_ops = (1 if self.step.forward_only else 2) * count * layout.num_chunks
        return OwnOrders(
            chunk_weights=self.runner.weights,
            chunk_kinds=self.runner.kinds,
            pp=layout.pp,
            vpp=layout.vpp,
            group=self.step.group_size or 1,
            warmup=self._warmups(count)[0],
            p2p=self.runner.p2p,
            cap=self._cap(draft),
            alignment=self.unit,
            least_piece=self.step.least_piece,
            forward_only=self.step.forward_only,
            backward_ratio=float(self.cost.backward_ratio),
            weight_ratio=float(self.cost.weight_ratio) if self.split else 0.0,
            split=self.split,
            ops=np.empty((layout.dp + 1, num_ops, 5), dtype=np.int64),
            num_ops=np.zeros(layout.dp + 1, dtype=np.int64),
        )

    def _cap(self, draft: Draft) -> float:
        """Tokens that a stage may hold, each chunk counted whole: at most `Plan.live_cap`."""
        layout = self.layout
        if self.step.max_live is not None:
            return float(self.step.max_live)
        if self.step.forward_only:
            return math.inf
        count = draft.num_microbatches
        order = self.runner.order(count)
        in_flight = float(order.peak_live(np.ones(count)).max())
        budget = self.step.budget or 0
        # Under context_parallel="dynamic" no row puts more tokens on a rank than the budget.
        is_wide = draft.widths is not None or not draft.row_of.size
        longest = budget if is_wide else max(int(draft.row_tokens().max()), layout.row_alignment)
        over = 0
        if self.policy.oversize == "alone":
            ends = draft.items.end
            over = int(ends[ends > budget].max(initial=0)) * layout.vpp
        return in_flight * max(layout.aligned_row_tokens(longest), budget) + over

    def _improve(self, found: Scored, budget: int) -> None:
        """Improve a draft by moves, if its rows may change and there is something to gain."""
        movable = self.step.prefixes is None and self.step.max_samples is None
        movable = movable and not self.step.lockstep
        if not movable or self.policy.row_shape == "uniform" or found.seconds == math.inf:
            return
        # With few row lengths moves may make rows shorter.
        is_near = found.seconds <= found.mean_work(self.runner) * (1 + _NEAR)
        if is_near and not self.layout.row_lengths:
            return
        assert found.own is not None
        num_ops = found.own.ops.shape[1]
        budget = min(budget, budget * _OPERATIONS // num_ops)
        if found.rule is not None:
            # A simulation of the step is one of each rank.
            budget = found.affordable(budget // self.layout.dp, _MOST_PLACES)
        if budget > 0:
            found.refine(self.runner, budget)


def _every_choice(
    counts: list[int],
    stretches: tuple[float | None, ...],
    widens: bool,
    shares: Sequence[float],
) -> list[_Choice]:
    """The choices of these values of M, longest pieces and shares, with all places."""
    return [
        _Choice(count, stretch, place, widens, share)
        for count, stretch, place, share in product(counts, stretches, _PLACES, shares)
    ]


def _contenders(found: _ByCount) -> list[Scored]:
    """The fastest drafts within the cap on live tokens, the fastest first, of values of M that are
    apart."""
    chosen: dict[int, Scored] = {}
    for draft, choice in sorted(found.values(), key=lambda pair: pair[0].seconds):
        count = choice.num_microbatches
        is_apart = all(abs(count - other) >= _APART * other for other in chosen)
        if is_apart and draft.seconds < math.inf:
            chosen[count] = draft
    return list(chosen.values())[:_CONTENDERS]


def _some(choices: list[_Choice], limit: int) -> list[_Choice]:
    """At most so many choices, evenly spread."""
    every = max(1, -(-len(choices) // max(limit, 1)))
    return choices[every // 2 :: every][:limit]
