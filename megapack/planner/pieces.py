"""The search for steps whose stages run other operations than Megatron's schedules.

    M, the longest piece, chains' place   -> boards packed anew
    the drafts of whole samples           -> their seconds in orders of their own
    the best few of each kind             -> moves; a board that is far behind gets none

Under context_parallel="dynamic" this is done for rows on one rank each and for rows over several.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from megapack.planner.cuts import CutItems, families_of, is_alone
from megapack.planner.draft import Draft
from megapack.planner.items import Items
from megapack.planner.scored import Scored, Way, real_seconds
from megapack.planner.starts import Choice, counts_to_try, cut_for, cut_start, loosened
from megapack.planner.step import UNLIMITED

# All constants of this module were chosen by hand. docs/maintainers/planner.md says how to judge a
# change.

# The longest piece, in parts of a mean row's work.
_STRETCHES = (1.0, 1.5)
# The most work of a chain on a rank, in parts of a mean rank's. With 128 samples on dp=8 one sample
# may have the work of a rank; in pieces on one rank it would leave that rank nothing beside it.
_SHARES = (0.15, 0.3, 0.6)
# Places of chains in a rank's order.
_PLACES = (0.0, 0.5, 1.0)
# Simulations of ranks for boards, as a part of the policy's evaluations: 1,024, which are 256
# boards on dp=4. Four times as many boards and moves make steps 0.26 % faster in the mean, and
# planning twice as slow.
_BOARDS_PART = 2
# Boards that have both pieces and rows over several ranks, of each kind: those that try 2**23 cells
# for items in all, and 16 at least. 2,048 items in 8 x 32 cells are 2**19.
_WIDE_PLACES = 2**23
_WIDE_BOARDS = 16
# At least so many where samples hardly fit under the cap on live tokens.
_TIGHT_BOARDS = 128
# Moves of each kind of board have the policy's evaluations, of up to 512 operations, and fewer of
# longer orders. The kinds: whole samples, pieces, and rows over several ranks.
_OPERATIONS = 512
_CONTENDERS = 2
# Places that moves try for items of rows over several ranks, for each simulation: fewer than in the
# search for these rows, which has been there before.
_MOST_PLACES = 2000
# Contenders' values of M differ by this part from those of faster ones: from 20 these are 18 or
# less, or 22 or more.
_APART = 0.1
# A board that is so much slower than the fastest gets no moves: of rows over several ranks, and of
# rows on one rank each with many items per rank. With fewer, moves made up for more than 10 %.
_WIDE_REACH = 0.05
_REACH = 0.1
_MANY_ITEMS = 32
# A step that takes so little more than the mean work of its ranks is not improved.
_NEAR = 0.003
# An order of its own has to be this much faster than Megatron's, 0.999 s for 1 s.
_LEAST_GAIN = 1e-3

# The fastest board of each M.
_ByCount = dict[int, Scored]


def plan_pieces(
    items: Items, fixed: Draft | None, wide: Draft | None, *, is_tight: bool = False
) -> Draft | None:
    """The best draft with an order of its own; None if none is faster than `fixed`.

    Args:
        fixed: the best draft in Megatron's order, of rows on one DP rank each; None if there is
            none that the policy allows.
        wide: the best one with rows over several ranks, the same.
        is_tight: samples hardly fit under the cap on live tokens, so more boards are made, of
            whole units of a row.
    """
    best = _Search(items, fixed, wide, is_tight).run()
    seconds = math.inf if fixed is None else real_seconds(fixed)
    if best is None or best.seconds >= seconds * (1 - _LEAST_GAIN):
        return None
    draft = best.draft()
    return replace(draft, board_seconds=draft.seconds())


class _Search:
    def __init__(
        self, items: Items, fixed: Draft | None, wide: Draft | None, is_tight: bool
    ) -> None:
        step, layout = items.step, items.step.layout
        self.items = items
        self.step = step
        self.layout = layout
        self.policy = step.policy
        self.is_tight = is_tight
        self.split = self.policy.backward == "split" and not step.forward_only
        # Pieces of whole units of a row add no padding to the sample.
        unit = layout.row_alignment if is_tight else layout.sample_alignment
        self.way = Way(items, own_order=True, is_real=True, unit=unit)
        single = self.way.work[is_alone(items)]
        # The work of the sample that has most, in mean ranks.
        self.heaviest = float(single.max(initial=0.0)) / (self.way.rank_work or 1.0)
        # Rows may lie over so many ranks as those of the wide draft, or else over any.
        self.wide_way: Way | None = None
        if self.policy.context_parallel == "dynamic" and step.budget is not None:
            widths = self.policy.widths(layout)
            widest = widths[-1] if wide is None else int(wide.widths.max())
            wanted = 2 * max(self.heaviest / _SHARES[0], 1.0)
            widest = max(widest, *(width for width in widths if width < wanted))
            self.wide_way = replace(self.way, num_levels=widest.bit_length())
        self.fixed = fixed
        self.wide = wide
        # Whatever the place, the samples are cut in the same way.
        self.cuts: dict[Choice, tuple[CutItems, Way] | None] = {}
        # What was made: choices may cut samples alike.
        self.made: set[tuple[object, ...]] = set()

    def run(self) -> Scored | None:
        """The best board; None if none respects the cap on live tokens."""
        kinds = self._new_boards() if self._may_pack() else ([], [], [])
        if self.fixed is not None:
            kinds[0].insert(0, self.way.score_draft(self.fixed))
        if self.wide is not None and self.split and self.wide_way is not None:
            kinds[2].insert(0, loosened(self.wide_way, self.wide))
        every = [scored for kind in kinds for scored in kind]
        fastest = min((scored.seconds for scored in every), default=math.inf)
        is_many = self.items.num_items >= _MANY_ITEMS * self.layout.dp
        for kind in kinds:
            for scored in kind:
                reach = _WIDE_REACH if scored.rule else _REACH if is_many else math.inf
                if scored.seconds <= fastest * (1 + reach):
                    self._improve(scored, self.policy.search // len(kind))
                fastest = min(fastest, scored.seconds)
        best = min(every, key=lambda scored: scored.seconds, default=None)
        return None if best is None or best.seconds == math.inf else best

    def _improve(self, scored: Scored, budget: int) -> None:
        """Improve a board by moves, if its rows may change and there is something to gain."""
        movable = self.step.prefixes is None and self.step.max_samples is None
        movable = movable and not self.step.lockstep
        if not movable or self.policy.row_shape == "uniform" or scored.seconds == math.inf:
            return
        # With few row lengths moves may make rows shorter.
        if scored.seconds <= scored.mean_work() * (1 + _NEAR) and not self.layout.row_lengths:
            return
        budget = min(budget, budget * _OPERATIONS // scored.num_ops)
        if scored.rule is not None:
            # A simulation of the step is one of each rank.
            budget = scored.affordable(budget // self.layout.dp, _MOST_PLACES)
        scored.improve(budget)

    def _may_pack(self) -> bool:
        """Whether items may be in other rows than those of the drafts of whole samples."""
        if self.step.cuts_samples or not self.split:
            return self.step.cuts_samples
        is_uniform = self.policy.row_shape == "uniform"
        return self.layout.pp > 1 and self.step.budget is not None and not is_uniform

    def _new_boards(self) -> tuple[list[Scored], list[Scored], list[Scored]]:
        """The fastest boards that are packed anew, each of another M: those of whole samples, those
        with pieces, both with rows on one rank each, and those with rows over several."""
        pools: tuple[_ByCount, _ByCount, _ByCount] = ({}, {}, {})
        for choice in self._choices():
            found = pools[2 if choice.is_wide else int(choice.stretch is not None)]
            scored = self._start(choice)
            best = found.get(choice.count)
            if scored is not None and (best is None or scored.seconds < best.seconds):
                found[choice.count] = scored
        uncut, cut, wide = map(_contenders, pools)
        return uncut, cut, wide

    def _most_boards(self, wide_count: int = 0) -> int:
        """Boards of one kind that may be made.

        Args:
            wide_count: M of those with rows over several ranks; 0 for others.
        """
        limit = max(1, self.policy.search // (_BOARDS_PART * self.layout.dp))
        limit = max(limit, _TIGHT_BOARDS) if self.is_tight else limit
        places = self.items.num_items * self.layout.dp * wide_count
        return min(limit, max(_WIDE_PLACES // places, _WIDE_BOARDS)) if places else limit

    def _choices(self) -> list[Choice]:
        """All values of M, the longest piece and the chains' place, as far as the limit allows."""
        counts = self._counts(1)
        limit = self._most_boards()
        choices = []
        # Where samples over the budget must be cut, whole ones are left out.
        if not self.step.cuts_samples or (self.split and self.fixed is not None):
            choices = _some([Choice(count, None) for count in counts], limit)
        if self.step.cuts_samples:
            choices += _some(_every_choice(counts, _STRETCHES), limit)
        if self.wide_way is None or not self.step.cuts_samples:
            return choices
        limit = self._most_boards(max(counts))
        if self._mixes(self.wide_way):
            every = _every_choice(counts, (_STRETCHES[0], None))
            choices += _some([replace(choice, is_wide=True) for choice in every], limit)
        widest = 1 << (self.wide_way.num_levels - 1)
        shares = [share for share in _SHARES if share < self.heaviest]
        if widest > 1 and shares:
            # A sample over the budget has fewer pieces over several ranks.
            every = _every_choice(self._counts(widest), _STRETCHES, shares)
            choices += _some([replace(choice, is_wide=True) for choice in every], limit)
        return choices

    def _start(self, choice: Choice) -> Scored | None:
        """The board of a choice; None if items find no rows, or another choice has the same one."""
        key = replace(choice, place=0.0)
        if key not in self.cuts:
            way = self.wide_way if choice.is_wide else self.way
            assert way is not None
            cut = cut_for(way, choice)
            self.cuts[key] = None if cut is None else (cut, replace(way, items=cut.items))
        found = self.cuts[key]
        if found is None:
            return None
        cut, way = found
        place = choice.place if cut.sizes.size else 0.0
        shape = choice.count, place, choice.is_wide, cut.sizes.tobytes(), cut.widths.tobytes()
        if shape in self.made:
            return None
        self.made.add(shape)
        return cut_start(way, cut, choice)

    def _mixes(self, way: Way) -> bool:
        """Whether pieces and whole items over several ranks may have to be in one step: families
        are in pieces, samples are that no width holds, or sets go over several ranks."""
        held = np.where(is_alone(self.items), way.row_cost.alone[-1], way.row_cost.alone[0])
        return bool(self.items.num_pieces or (self.items.aligned > held).any())

    def _counts(self, width: int) -> list[int]:
        """Legal values of M to try.

        Args:
            width: DP ranks that pieces may lie over.
        """
        dp = self.layout.dp
        capacity = self.step.capacity
        tokens = self.items.aligned
        pieces = np.where(tokens > capacity, -(-tokens // (width * capacity)), 0)
        if not self.step.cuts_samples:
            pieces = np.minimum(pieces, 1)
        # The rows of a sample over the budget hold nothing else.
        held = int(np.where(pieces > 0, pieces * width * capacity, tokens).sum())
        families = families_of(self.items)[1]
        in_families = max(int(families.max(initial=0)), -(-int(families.sum()) // dp))
        rows = max(-(-held // (capacity * dp)), int(pieces.max()), in_families)
        return counts_to_try(self.way, self.step.legal_count(rows), UNLIMITED)


def _every_choice(
    counts: list[int], stretches: tuple[float | None, ...], shares: Sequence[float] = (math.inf,)
) -> list[Choice]:
    """The choices of these values of M, longest pieces and shares, with all places."""
    return [
        Choice(count, stretch, place, share)
        for count, stretch, place, share in product(counts, stretches, _PLACES, shares)
    ]


def _contenders(found: _ByCount) -> list[Scored]:
    """The fastest boards within the cap on live tokens, the fastest first, of values of M that are
    apart."""
    chosen: dict[int, Scored] = {}
    for scored in sorted(found.values(), key=lambda scored: scored.seconds):
        is_apart = all(abs(scored.count - other) >= _APART * other for other in chosen)
        if is_apart and scored.seconds < math.inf:
            chosen[scored.count] = scored
    return list(chosen.values())[:_CONTENDERS]


def _some(choices: list[Choice], limit: int) -> list[Choice]:
    """At most so many choices, evenly spread."""
    every = max(1, -(-len(choices) // max(limit, 1)))
    return choices[every // 2 :: every][:limit]
