"""The search for rows over several DP ranks, under `context_parallel="dynamic"`.

    M and G              -> the profile for divisible work gives each position's target
    targets              -> items onto a board, long ones over several ranks
    the best few boards  -> improved by moves, all ranks simulated together

A long sample alone on one rank is a step's critical path, while the other ranks wait. Cut over the
ranks of a position whose target it then meets, it takes no longer than their other rows. So the
profile of perfectly divisible work, which no plan of whole samples can reach, is nearly reached.

The draft of rows of one rank each is one of the boards that are improved, so no plan is slower than
it in the simulator. If it is near the best profile already, nothing is searched.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from megapack.base.arrays import Floats
from megapack.errors import PlanError
from megapack.layout import Layout
from megapack.planner.draft import Draft
from megapack.planner.fill import fill_all, fill_rule
from megapack.planner.items import Items
from megapack.planner.profile import Profile, default_profile, find_profile
from megapack.planner.scored import Scored, blank_board, filled_board, row_cost, score_shared_rows
from megapack.planner.step import spread_counts

# All constants of this module were chosen by hand. docs/planner.md measures the whole search.

# A step within this part of the best profile is not searched further: 1.005 s for 1 s.
_NEAR = 0.005
# Values of M are tried up to twice the closed form for equal micro-batches. A step of few samples
# needs the larger ones, as long samples fill several cells.
_MAX_GROWTH = 6
_MANY_POSITIONS = 40
# Without a pipeline more positions only make room to arrange wide rows: up to 12 more than the
# fewest.
_EXTRA_POSITIONS = 12
# Rounds of the profile search; each tries every level twice.
_ROUNDS = 5
# An item may take this many times its position's target before it goes over more ranks.
_STRETCHES = (1.0, 1.15, 1.35, 1.7)
# Boards of so many items times cells are filled with one stretch only: 2,048 items in 8 x 32 cells.
_MANY_PLACES = 100_000
_ONE_STRETCH = (1.15,)
# Of more than 100 positions a few more or less matter little: only values of M are tried whose
# profile takes hardly longer than the best one that could be filled, 1.002 s for 1 s.
_ENOUGH_POSITIONS = 100
_ALIKE = 0.002
# Work grows by about this part, for the items that are cut.
_OVERHEAD = 1.02
# Simulations of the whole step: at most as many as the policy's evaluations, and at most 768
# operations of ranks for each. By default these are 2,048 and 1.5 * 2**20. On dp8 x pp4 x vpp2 with
# M=32 a rank has 2 * 32 * 8 = 512 operations, a simulation has 4,096, and there are 384 of them.
_OPERATIONS = 768
# Places that moves try for items, for each simulation; see `Scored.affordable`.
_MOST_PLACES = 16_000
# The best boards, each of another M, get a third of them; the fastest then gets the rest.
_CONTENDERS = 3
_CONTENDERS_PART = 3
# Relative gain that makes a draft better than the fixed one: more than rounding in fp64.
_LEAST_GAIN = 1e-9


@dataclass(frozen=True)
class _Shape:
    """M with its profile."""

    count: int
    profile: Profile


def plan_wide_rows(items: Items, fixed: Draft | None) -> Draft | None:
    """The best draft with rows over several ranks; None if it is not faster than `fixed`.

    Args:
        fixed: the best draft of rows on one rank each; None if there is none, because an item is
            over the budget or no such draft respects the cap on live tokens.

    Raises:
        PlanError: `fixed` is None, and no draft respects the policy.
    """
    if fixed is not None and items.step.layout.dp == 1:
        return None
    search = _WideSearch(items, fixed)
    draft = search.run()
    if draft is None and fixed is None:
        raise search.refuse()
    return draft


class _WideSearch:
    def __init__(self, items: Items, fixed: Draft | None) -> None:
        self.packed = items
        self.step = items.step
        self.fixed = fixed
        self.layout: Layout = items.step.layout
        self.policy = items.step.policy
        self.cost = items.step.balanced_cost
        self.runner = items.step.runner(self.cost)
        self.divisible_runner = self.runner.for_shares(items.square_share)
        # Seconds of each item's forward through one chunk on one rank, and their sum per rank.
        self.work: Floats = items.work * self.cost.share_of_rank(self.layout)
        self.rank_work = math.fsum(self.work.tolist()) / self.layout.dp
        # Work of a full row with average samples.
        tokens = int(items.aligned.sum())
        self.cap = self.rank_work * self.layout.dp * self.step.capacity / tokens

    def run(self) -> Draft | None:
        """A draft that is better than the fixed one; None if there is none."""
        shapes = self._shapes()
        goal = (1 + _NEAR) * min(shape.profile.seconds for shape in shapes)
        self._read_sizes(1)
        before = self._of_fixed()
        if before is not None and before.seconds <= goal:
            return None
        # Moves may make the fixed draft itself faster.
        fixed_seconds = math.inf if before is None else before.seconds
        self._read_sizes(self._useful_levels(shapes))
        if self.rule is None:
            return None
        best = self._filled(shapes, before)
        if not best:
            return None
        if self.policy.search > 0:
            best = self._improved(best, goal)
        if best[0].seconds == math.inf:
            return None
        draft = best[0].moved()
        if self._is_exact:
            draft = replace(draft, board_seconds=best[0].seconds)
        if before is not None and not self._is_better(draft, best[0], fixed_seconds):
            return None
        return draft

    def refuse(self) -> PlanError:
        """What is wrong if no draft respects the policy."""
        layout = self.layout
        cap = self.policy.max_live_tokens_per_gpu
        if cap is None:
            reason = f"fills all micro-batches (unreachable={self.policy.unreachable!r})"
            setting = "raise max_tokens_per_gpu"
            if self.policy.unreachable != "pad":
                setting += " or set unreachable='pad'"
        else:
            reason = f"stays within max_live_tokens_per_gpu={cap}"
            setting = "raise it or set a larger cp"
        return PlanError(
            f"step {self.step.number}: no plan found {reason} with samples of up to "
            f"{int(self.packed.aligned.max())} padded tokens on dp={layout.dp}, pp={layout.pp}, "
            f"vpp={layout.vpp}, cp={layout.cp} and context_parallel='dynamic'; {setting}"
        )

    def _shapes(self) -> list[_Shape]:
        """Values of M to try, with their profiles; the fastest for divisible work first."""
        made = [_Shape(count, self._profile(count)) for count in self._counts()]
        return sorted(made, key=lambda s: s.profile.seconds)

    def _counts(self) -> list[int]:
        """Legal values of M to try, smaller ones closer together."""
        layout = self.layout
        held = self.step.capacity * layout.dp
        least = self.step.legal_count(-(-int(self.packed.aligned.sum()) // held))
        if layout.pp == 1:
            top = least + _EXTRA_POSITIONS
        else:
            best = float(least)
            if self.cost.fixed > 0:
                equal = self.rank_work * (layout.pp - 1) / (layout.vpp * self.cost.fixed)
                best = math.sqrt(equal)
            most = max(_MAX_GROWTH * least, _MANY_POSITIONS)
            top = int(max(least + layout.group_size, min(2 * best, most)))
        wanted = spread_counts(least, top)
        if self.policy.search == 0:
            wanted = [wanted[(len(wanted) - 1) // 2]]
        own = [] if self.fixed is None else [self.fixed.num_microbatches]
        most = self.step.legal_count(max(self.packed.num_items, *own, 1))
        legal = [min(self.step.legal_count(m), most) for m in (*wanted, *own)]
        return sorted(dict.fromkeys(legal))

    def _profile(self, count: int) -> Profile:
        """The profile of M micro-batches for divisible work."""
        none = np.zeros(0)
        if self.policy.search == 0:
            profile = default_profile(self.layout, count, 0)
            equal = self.rank_work / count + float(self.cost.fixed)
            chunks = (count * self.layout.vpp + self.layout.pp - 1) / self.layout.vpp
            return Profile(profile.classes, profile.levels, profile.huge_order, equal * chunks, 0)
        return find_profile(
            self.divisible_runner,
            count,
            work=self.rank_work,
            fixed=float(self.cost.fixed),
            cap=self.cap,
            huge=none,
            rounds=_ROUNDS,
        )

    def _read_sizes(self, num_levels: int) -> None:
        """Sizes of the items, and costs and limits of rows, up to a number of levels."""
        self.row_cost = row_cost(self.step, self.cost, num_levels)
        self.rule = fill_rule(self.packed, self.row_cost, self.work)

    def _useful_levels(self, shapes: list[_Shape]) -> int:
        """Levels up to where the heaviest item takes under half a mean row and the longest fits.

        More ranks would cost memory here: sizes of a million samples take 16 MB per level.
        """
        widths = self.policy.widths(self.layout)
        row = self.rank_work / max(shape.count for shape in shapes) + float(self.cost.fixed)
        longest = int(self.packed.aligned.max())
        levels = 1
        while levels < len(widths):
            width = widths[levels - 1]
            unit = self.layout.over(width).row_alignment
            # Alignment may add a unit per sample of an item.
            padded = longest + unit * int(self.packed.item_samples.max())
            if 2 * float(self.work.max()) <= row * width and padded <= self.step.capacity * width:
                break
            levels += 1
        return levels

    def _targets(self, shape: _Shape) -> Floats:
        """float64 [M]: seconds that the rows at each position should take."""
        work = self.rank_work * _OVERHEAD
        return shape.profile.targets(work, np.zeros(0), self.cap) + float(self.cost.fixed)

    def _filled(self, shapes: list[_Shape], before: Scored | None) -> list[Scored]:
        """The best board of each M and the fixed draft's, fastest first.

        A shape is left out if even divisible work would take longer than the fastest board, or, of
        many positions, a little longer than with the best shape that could be filled.
        """
        best = [] if before is None else [before]
        alike = math.inf
        for shape in shapes:
            fastest = min((c.seconds for c in best), default=math.inf)
            if shape.profile.seconds >= fastest:
                break
            if shape.count > _ENOUGH_POSITIONS and shape.profile.seconds > alike:
                continue
            filled = [c for c in self._best_fill(shape) if c.seconds < math.inf]
            if filled:
                alike = min(alike, (1 + _ALIKE) * shape.profile.seconds)
            best += filled
        count = max(shape.count for shape in shapes)
        while not any(c.seconds < math.inf for c in best) and count < self.packed.num_items:
            # As many positions as items have room for all of them.
            most = self.step.legal_count(self.packed.num_items)
            count = min(self.step.legal_count(2 * count), most)
            best += self._best_fill(_Shape(count, self._profile(count)))
        return sorted(best, key=lambda c: c.seconds)

    def _best_fill(self, shape: _Shape) -> Iterator[Scored]:
        """Yield the fastest board of one M, if all items find rows."""
        assert self.rule is not None
        rule = self.rule._replace(targets=self._targets(shape))
        many = self.work.size * self.layout.dp * shape.count > _MANY_PLACES
        many = many or self.policy.search == 0
        draft = Draft.blank(self.packed, shape.count)
        filled = []
        for stretch in _ONE_STRETCH if many else _STRETCHES:
            board = blank_board(self.packed, self.row_cost, shape.count)
            if not fill_all(board, rule, stretch):
                continue
            filled.append(score_shared_rows(draft, board, self.runner, rule))
        if filled:
            yield min(filled, key=lambda c: c.seconds)

    def _improved(self, filled: list[Scored], goal: float) -> list[Scored]:
        """The fastest boards after moves, the fastest first."""
        search = self.policy.search
        passes = 1 if self.step.forward_only else 2
        num_ops = passes * filled[0].board.rows.shape[1] * self.layout.num_chunks * self.layout.dp
        budget = min(search, search * _OPERATIONS // num_ops)
        contenders = filled[:_CONTENDERS]
        each = budget // _CONTENDERS_PART // len(contenders)
        for candidate in contenders:
            self._improve(candidate, each, goal)
        contenders.sort(key=lambda c: c.seconds)
        self._improve(contenders[0], budget - each * len(contenders), goal)
        return contenders

    def _improve(self, candidate: Scored, budget: int, goal: float) -> None:
        if budget > 0 and candidate.seconds < math.inf:
            candidate.anneal(candidate.affordable(budget, _MOST_PLACES), goal)

    def _of_fixed(self) -> Scored | None:
        """The fixed draft on a board; None without one."""
        if self.fixed is None or self.rule is None:
            return None
        count = self.fixed.num_microbatches
        board = filled_board(self.fixed, self.cost, num_levels=self.row_cost.unit.size)
        equal = np.full(count, self.rank_work / count + float(self.cost.fixed))
        rule = self.rule._replace(targets=equal)
        return score_shared_rows(self.fixed, board, self.runner, rule)

    @property
    def _is_exact(self) -> bool:
        """Whether the board's seconds are those of the step: under balance="tokens" they are
        tokens, and rows that share prefixes are shorter than the board counts."""
        is_timed = not self.step.by_tokens or self.step.cost is None
        return is_timed and self.step.prefixes is None

    def _is_better(self, draft: Draft, candidate: Scored, fixed_seconds: float) -> bool:
        """Whether a draft is faster than the fixed one in the simulator."""
        if candidate.seconds >= fixed_seconds * (1 - _LEAST_GAIN):
            return False
        if self._is_exact:
            return True
        assert self.fixed is not None
        return draft.seconds() < self.fixed.seconds() * (1 - _LEAST_GAIN)
