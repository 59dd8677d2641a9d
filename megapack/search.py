"""The search for a step's fastest legal draft.

    counts (M) and groups (G) worth a look  -> profile of each, for divisible work
    the best few                            -> samples packed to the profile, dealt, ordered, scored
    the best one                            -> refined by moves until the evaluations are spent

An evaluation is one simulated rank. `Policy.search` is their number per step; with 0 the profile
is a canned one, at a count from the closed form of equal micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from megapack.cost import TOKENS
from megapack.counts import fewest_rows, least_count, rank_counts, split_heaviest
from megapack.deal import deal, place_by_target
from megapack.errors import PlanError
from megapack.inputs import Floats, Ints
from megapack.packing_balance import make_room, pack_to_targets
from megapack.per_rank import adjust_counts
from megapack.pipeline import Runner
from megapack.problem import StepDraft, StepProblem
from megapack.profile import Profile, canned_profile, find_profile
from megapack.state import Scored, score_draft

_MAX_COUNTS = 8
_MAX_PACKED = 4
_MAX_ROUNDS = 8
_LEAST_GAIN = 0.002
# Packing again for even ranks: so often at most, and not where the slowest is this near the mean.
_MAX_EVENED, _EVEN = 6, 1.002
# Above this multiple of the fewest rows, more micro-batches are not looked at.
_MAX_GROWTH = 6


@dataclass(frozen=True)
class _Shape:
    """Counts, a group size, and the sizes that rows should have."""

    counts: Ints
    """int64 [dp], micro-batches of each rank."""
    group: int
    profile: Profile


def plan_rows(problem: StepProblem) -> StepDraft:
    """The best draft that the policy's evaluations find.

    Raises:
        PlanError: no draft keeps the cap on live tokens.
    """
    return _Search(problem).run()


class _Search:
    def __init__(self, problem: StepProblem) -> None:
        self.problem, self.layout, self.policy = problem, problem.layout, problem.policy
        self.by_tokens = problem.cost is None or self.policy.balance == "tokens"
        self.cost = TOKENS if problem.cost is None or self.by_tokens else problem.cost
        self.uniform = self.policy.row_shape == "uniform"
        self.lockstep = self.layout.ep_spans_dp
        self.work = problem.work
        if self.uniform:
            # Every row is as long as the longest: what is to be even is tokens.
            self.work = problem.aligned.astype(np.float64)
        self.falling = np.sort(self.work)[::-1]
        self.runner = Runner(self.layout, self.cost, problem.forward_only)
        self.left = self.policy.search
        self.fewest, self.num_fewest = fewest_rows(problem)

    def run(self) -> StepDraft:
        capped = self.policy.max_live_tokens_per_gpu is not None
        if self.left < 2 * self.layout.dp and not capped:
            # Not enough to score two drafts.
            return next(self._drafts())[1]
        best = self._best_scored()
        if best.seconds == math.inf:
            raise self._over_live_cap()
        if self.policy.count_rule == "per_rank" and not self.uniform and self.left > 0:
            best = self._with_own_counts(best)
        if self.left > 0:
            best.refine(self.runner, self.left, self.lockstep)
        return best.draft

    def _best_scored(self) -> Scored:
        # Where more micro-batches save no bubble that is counted, they must balance better.
        least_gain = _LEAST_GAIN if self.by_tokens or self.layout.pp == 1 else 0.0
        best: Scored | None = None
        for shape, draft in self._drafts():
            scored = self._score(draft)
            if shape is not None and not self.lockstep:
                scored = self._evened(shape, scored)
            if best is None or scored.seconds < best.seconds * (1 - least_gain):
                best = scored
            if self.left < 2 * self.layout.dp and best.seconds < math.inf:
                break
        assert best is not None, "the last draft can always be made"
        return best

    def _score(self, draft: StepDraft) -> Scored:
        self.left -= self.layout.dp
        return score_draft(self.problem, self.cost, self.runner, draft, self.lockstep)

    def _evened(self, shape: _Shape, best: Scored) -> Scored:
        """Pack again with less work for slow ranks while that helps."""
        shares = np.ones(self.layout.dp)
        scored = best
        for _ in range(_MAX_EVENED):
            seconds = scored.state.seconds
            mean = float(np.cumsum(seconds)[-1]) / seconds.size
            if self.left < 2 * self.layout.dp or float(seconds.max()) < mean * _EVEN:
                break
            shares = np.maximum(shares * (1 - (seconds - mean) / seconds.max()), 0.01)
            draft = self._pack(shape, shares * (shares.size / float(np.cumsum(shares)[-1])))
            if draft is None:
                break
            scored = self._score(draft)
            if scored.seconds < best.seconds:
                best = scored
        return best

    def _with_own_counts(self, best: Scored) -> Scored:
        budget = self.left // 4
        self.left -= budget
        other = self._score(adjust_counts(self.problem, best, self.runner, budget))
        return other if other.seconds < best.seconds else best

    def _drafts(self) -> Iterator[tuple[_Shape | None, StepDraft]]:
        """Drafts worth scoring; the last one always exists."""
        even = np.ones(self.layout.dp)
        pairs = ((shape, self._pack(shape, even)) for shape in self._shapes())
        packed = ((shape, draft) for shape, draft in pairs if draft is not None)
        yield from islice(packed, _MAX_PACKED)
        yield from ((None, self._split(group)) for group in self._groups())

    def _shapes(self) -> list[_Shape]:
        """Shapes by the seconds that their profile would take."""
        if self.problem.max_samples is not None:
            return []
        pairs = [(group, count) for group in self._groups() for count in self._counts(group)]
        if self.left == 0 or self.layout.pp == 1:
            return [self._shape(count, group, None) for group, count in pairs]
        rounds = min(_MAX_ROUNDS, self.left // (8 * max(1, len(pairs)) * 2 * self.layout.pp))
        shapes = [self._shape(count, group, max(1, rounds)) for group, count in pairs]
        return sorted(shapes, key=lambda s: s.profile.seconds)

    def _groups(self) -> list[int]:
        layout = self.layout
        if self.policy.group_size == "fixed" or layout.vpp == 1:
            return [layout.group_size]
        pp = layout.pp
        return sorted({layout.group_size, pp, pp + pp // 2, 2 * pp})

    def _counts(self, group: int) -> list[int]:
        """Legal counts from the fewest up to where more cannot pay, at most _MAX_COUNTS."""
        layout, rule = self.layout, self.policy.count_rule
        least = least_count(self.problem, self.num_fewest, group)
        most = self.problem.num_samples // layout.dp
        if least > most:
            return []
        best = least if self.by_tokens or layout.pp == 1 else self._closed_form()
        if self.policy.search == 0:
            wanted = [max(least, min(best, most, 2 * least)), least]
        else:
            top = max(least, min(most, 2 * best, _MAX_GROWTH * least))
            ratio = (top / least) ** (1 / (_MAX_COUNTS - 1))
            wanted = [round(least * ratio**k) for k in range(_MAX_COUNTS)]
        if layout.pp == 1 or self.by_tokens:
            wanted = [least, least + 1, least + 2 + least // 16]
        legal = [layout.next_legal_count(count, rule, group) for count in wanted]
        return [count for count in dict.fromkeys(legal) if count <= most]

    def _closed_form(self) -> int:
        """M of least seconds for equal micro-batches: sqrt(work * (pp - 1) / (vpp * fixed))."""
        layout = self.layout
        overhead = self.cost.fixed * layout.vpp
        if overhead <= 0:
            return self.problem.num_samples
        work = self._rank_work()
        return max(1, round(math.sqrt(work * (layout.pp - 1) / overhead)))

    def _rank_work(self) -> float:
        """Seconds of one chunk's forward of a rank's share of all samples, `fixed` left out."""
        layout = self.layout
        work = float(np.cumsum(self.problem.work)[-1])
        return work / (layout.num_chunks * layout.cp * layout.dp)

    def _huge(self, above: float) -> Floats:
        """Every dp-th sample from the heaviest, while above a rank's mean row: one rank's share."""
        seconds = self.falling[:: self.layout.dp] / (self.layout.num_chunks * self.layout.cp)
        return seconds[seconds > above]

    def _shape(self, count: int, group: int, rounds: int | None) -> _Shape:
        counts = np.full(self.layout.dp, count, dtype=np.int64)
        if self.uniform or self.layout.pp == 1:
            return _Shape(counts, group, Profile(np.ones(count), math.inf, 0))
        if rounds is None:
            return _Shape(counts, group, canned_profile(self.runner, count, group))
        work = self._rank_work()
        tokens = int(self.problem.aligned.sum())
        profile = find_profile(
            self.runner,
            count,
            group,
            work=work,
            fixed=self.cost.fixed,
            cap=work * self.layout.dp * self.problem.capacity / tokens,
            huge=self._huge(work / count),
            rounds=rounds,
        )
        self.left -= profile.evaluations
        return _Shape(counts, group, profile)

    def _pack(self, shape: _Shape, shares: Floats) -> StepDraft | None:
        """Samples packed to a shape; `shares` of work per rank have mean 1."""
        levels, count = shape.profile.levels, shape.profile.levels.size
        dp, total = self.layout.dp, float(np.cumsum(self.work)[-1])
        targets = np.outer(shares, levels) * (total / (dp * count))
        if not (self.lockstep or self.uniform):
            make_room(targets, self.falling)
        row_of = pack_to_targets(
            self.problem.aligned, self.work, targets.ravel(), self.problem.capacity
        )
        if row_of is None:
            return None
        if self.lockstep or self.uniform:
            return self._dealt(row_of, dp * count, shape.counts, shape.group, levels)
        row_work = self._row_work(row_of, dp * count).reshape(dp, count)
        heaviest_first = np.argsort(-row_work, axis=1, kind="stable")
        ranks = heaviest_first + np.arange(dp)[:, None] * count
        return self._draft(row_of, place_by_target(ranks, levels), shape.group)

    def _split(self, group: int) -> StepDraft:
        counts = rank_counts(self.problem, self.num_fewest, group)
        row_of, num_rows = split_heaviest(
            self.fewest, self.num_fewest, int(counts.sum()), self.work
        )
        return self._dealt(row_of, num_rows, counts, group, None)

    def _dealt(
        self, row_of: Ints, num_rows: int, counts: Ints, group: int, levels: Floats | None
    ) -> StepDraft:
        ranks = deal(self._row_work(row_of, num_rows), counts, in_rounds=self.lockstep)
        rank_rows = [
            place_by_target(rows[None], np.ones(count) if levels is None else levels)[0]
            for rows, count in zip(ranks, counts.tolist(), strict=True)
        ]
        return self._draft(row_of, rank_rows, group)

    def _row_work(self, row_of: Ints, num_rows: int) -> Floats:
        row_work = np.zeros(num_rows)
        np.add.at(row_work, row_of, self.problem.work)
        return row_work

    def _draft(self, row_of: Ints, rank_rows: Iterable[Ints], group: int) -> StepDraft:
        group_size = group if self.layout.vpp > 1 else None
        return StepDraft(row_of=row_of, rank_rows=tuple(rank_rows), group_size=group_size)

    def _over_live_cap(self) -> PlanError:
        cap, layout = self.policy.max_live_tokens_per_gpu, self.layout
        return PlanError(
            f"step {self.problem.number}: no plan found keeps max_live_tokens_per_gpu={cap} with "
            f"samples of up to {int(self.problem.aligned.max())} padded tokens on pp={layout.pp}, "
            f"vpp={layout.vpp}, cp={layout.cp}; raise it or set a larger cp"
        )
