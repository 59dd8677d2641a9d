"""The search for a step's fastest legal draft.

    candidates for M       -> profile of each, for divisible work
    the best few profiles  -> items packed to their targets, rows assigned to ranks and ordered,
                              each rank simulated
    the best draft         -> refined by moves until the evaluations are spent

An evaluation simulates one rank; the caller limits their number. With 0 nothing is
simulated: M comes from the closed form for equal micro-batches, and the profile is the one that the
search would start with.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np

from megapack.base.arrays import Floats, Ints
from megapack.errors import PlanError
from megapack.planner.bins import first_fit, heaviest_first, pack_to_targets
from megapack.planner.counts import split_heaviest
from megapack.planner.draft import Draft
from megapack.planner.items import Items, by_row
from megapack.planner.partition import (
    lightest_ranks,
    order_by_target,
    rows_by_rank,
    rows_to_ranks,
)
from megapack.planner.profile import Profile, default_profile, find_profile
from megapack.planner.scored import Scored, score_draft
from megapack.planner.step import Step, spread_counts
from megapack.planner.uneven import concentrated, find_uneven

# All constants of this module were chosen by hand. docs/planner.md measures the whole search, with
# 2,048 evaluations and with none.

# Largest M that is tried, as a multiple of the smallest one.
_MAX_GROWTH = 6
# Values of M that are tried: from 8 to 6 * 8 they are 8, 11, 15, 21, 28, 37, 48.
_MAX_COUNTS = 8
# Limit on rounds of the profile search, which may spend a quarter of the evaluations. A
# round costs up to 2 evaluations for each of about 2 * pp levels, so that 2,048 evaluations for 8
# values of M on pp=4 allow 2048 / (4 * 8 * 2 * 8) = 4 rounds.
_MAX_ROUNDS = 8
_PROFILE_PART = 4
# Profiles that samples are packed to, best first. Simulating such a draft costs dp evaluations.
_MAX_PACKED = 4
# The same if there are profiles of unequal work, too: of equal work, of unequal work, and of
# unequal work with the huge samples together. Chosen on the traces of docs/planner.md.
_MAX_PACKED_EACH = (3, 2, 2)
# Profiles of unequal work are searched only if that many evaluations per rank are left, as many as
# their drafts need: 2,048 are enough for dp=40.
_UNEVEN_EVALUATIONS = 40
# Without a bubble a draft with more micro-batches than the fewest must be this much faster: M=11
# must take less than 0.998 s if M=10 takes 1 s.
_LEAST_GAIN = 0.002
# A draft is packed again with less work for slow ranks, at most 6 times, until the slowest rank is
# within 0.2 % of the mean. A rank keeps at least 1 % of a mean rank's work.
_MAX_EVENED = 6
_EVEN = 1.002
_LEAST_SHARE = 0.01
# Each of the two best drafts is refined with a quarter of the remaining evaluations, and the better
# one then gets the rest.
_CONTENDER_PART = 4


@dataclass(frozen=True)
class _Target:
    """A profile of M micro-batches, and what it was made for."""

    huge: list[Floats]
    """Per rank the work of the samples that get a micro-batch each, in descending order."""
    profiles: list[Profile]
    """Per rank."""
    shares: Floats
    """float64 [dp]: each rank's share of the work; their mean is 1."""
    seconds: float
    """Simulated seconds for divisible work; inf if not simulated."""

    @property
    def num_microbatches(self) -> int:
        """M."""
        return self.profiles[0].num_microbatches


def plan_rows(items: Items, evaluations: int) -> Draft:
    """The best draft that the search finds by so many evaluations.

    Raises:
        PlanError: no draft respects the cap on live tokens.
    """
    return _Search(items, evaluations).run()


class _Search:
    def __init__(self, items: Items, evaluations: int) -> None:
        self.items = items
        self.step: Step = items.step
        self.layout = items.step.layout
        self.policy = items.step.policy
        self.evaluations = evaluations
        self.evaluations_left = evaluations
        self.cost = items.step.balanced_cost
        self.uniform = self.policy.row_shape == "uniform"
        self.lockstep = items.step.lockstep
        self.work = items.work
        if self.uniform:
            # Every row is as long as the longest one, so tokens must be balanced.
            self.work = items.aligned.astype(np.float64)
        # Ranks in lockstep, or rows of one length: all ranks have the same targets.
        self.same_targets = self.lockstep or self.uniform
        # The longest items first, as all packing to targets takes them.
        self.order = heaviest_first(items.aligned, self.work)
        self.total = float(np.cumsum(self.work)[-1])
        # Work of a full row with average samples.
        self.cap = self.total * self.step.capacity / int(items.aligned.sum())
        self.runner = self.step.runner(self.cost)
        # Of divisible work, each part has the mean share of squares.
        self.divisible_runner = self.runner.for_shares(items.square_share)
        # The smallest legal M with room for the fewest rows.
        self.least_count = self.step.least_count(items.fewest_rows[1])

    def run(self) -> Draft:
        capped = self.policy.max_live_tokens_per_gpu is not None
        if self.evaluations_left < 2 * self.layout.dp and not capped:
            # Too few evaluations to compare two drafts.
            return next(self._drafts())[1]
        scored = self._scored_drafts()
        best = self._best(scored)
        if best.seconds == math.inf:
            raise self._over_live_cap()
        return self._refined(best, scored).moved()

    def _scored_drafts(self) -> list[Scored]:
        """Simulate drafts until the evaluations are spent and one respects the cap."""
        scored: list[Scored] = []
        for target, draft in self._drafts():
            candidate = self._score(draft)
            if target is not None and not self.same_targets:
                candidate = self._evened(target, candidate)
            scored.append(candidate)
            if self.evaluations_left < 2 * self.layout.dp and self._best(scored).seconds < math.inf:
                break
        return scored

    def _best(self, scored: list[Scored]) -> Scored:
        """The fastest draft; without a bubble, more micro-batches must gain _LEAST_GAIN."""
        if self.layout.pp > 1 and not self.step.by_tokens:
            return min(scored, key=lambda s: s.seconds)
        fewest = min(s.num_microbatches for s in scored)

        def seconds(draft: Scored) -> float:
            penalty = 1 + _LEAST_GAIN if draft.num_microbatches > fewest else 1.0
            return draft.seconds * penalty

        return min(scored, key=seconds)

    def _refined(self, best: Scored, scored: list[Scored]) -> Scored:
        """Refine the best draft and the fastest of those with the fewest micro-batches.

        The better of the two is then refined with the remaining evaluations.
        """
        fewest = min(s.num_microbatches for s in scored)
        other = min((s for s in scored if s.num_microbatches == fewest), key=lambda s: s.seconds)
        if other is not best and other.seconds < math.inf:
            for contender in (best, other):
                self._refine(contender, self.evaluations_left // _CONTENDER_PART)
            best = self._best([best, other])
        self._refine(best, self.evaluations_left)
        return best

    def _refine(self, scored: Scored, budget: int) -> None:
        if budget > 0:
            self.evaluations_left -= scored.refine(self.runner, budget)

    def _score(self, draft: Draft) -> Scored:
        self.evaluations_left -= self.layout.dp
        return score_draft(draft, self.cost, self.runner)

    def _evened(self, target: _Target, best: Scored) -> Scored:
        """Pack again with less work for slow ranks as long as that helps.

        Two ranks of 1.2 s and 1.0 s have a mean of 1.1 s; their shares of the work become
        1 - 0.1 / 1.2 = 0.917 and 1.083.
        """
        shares = np.ones(self.layout.dp)
        scored = best
        misses = 0
        for _ in range(_MAX_EVENED):
            seconds = scored.board.seconds
            if not np.isfinite(seconds).all() or not seconds.max() > 0:
                break
            mean = float(np.cumsum(seconds)[-1]) / seconds.size
            even = float(seconds.max()) < mean * _EVEN
            if even or misses > 1 or self.evaluations_left < 2 * self.layout.dp:
                break
            shares = np.maximum(shares * (1 - (seconds - mean) / seconds.max()), _LEAST_SHARE)
            draft = self._pack(target, shares * (shares.size / float(np.cumsum(shares)[-1])))
            if draft is None:
                break
            scored = self._score(draft)
            misses += scored.seconds >= best.seconds
            best = min(best, scored, key=lambda s: s.seconds)
        return best

    def _drafts(self) -> Iterator[tuple[_Target | None, Draft]]:
        """Yield drafts to simulate, at least one, each with its target if it has one."""
        even = np.ones(self.layout.dp)
        targets = self._targets()
        most = [_MAX_PACKED] if len(targets) == 1 else _MAX_PACKED_EACH
        for own, limit in zip(targets, most, strict=True):
            pairs = ((target, self._pack(target, even)) for target in own)
            packed = ((target, draft) for target, draft in pairs if draft is not None)
            yield from islice(packed, limit)
        by_rank = self._packed_by_rank()
        if by_rank is not None:
            yield None, by_rank
        if self.layout.pp == 1 and self.step.max_samples is None:
            # Rows in input order mix long and short samples, so they differ less than sorted ones.
            row_of, num_rows = first_fit(self.items.aligned, self.step.capacity)
            if num_rows <= self.layout.dp * self.least_count:
                yield None, self._split(row_of, num_rows)
        yield None, self._split(*self.items.fewest_rows)

    def _packed_by_rank(self) -> Draft | None:
        """A draft that assigns items to ranks before it makes rows; None if that does not apply.

        Without a pipeline only the sum of each rank's rows matters.
        """
        dp = self.layout.dp
        if self.layout.pp > 1 or self.same_targets or self.step.max_samples is not None:
            return None
        count = self.least_count
        row_of = rows_by_rank(self.items.aligned, self.work, dp, count, self.step.capacity)
        if row_of is None:
            return None
        ranks = np.arange(dp * count).reshape(dp, count)
        return self._draft(row_of, ranks)

    def _targets(self) -> list[list[_Target]]:
        """A target per M to try, sorted by simulated seconds if profiles are searched.

        Returns:
            Targets of equal work; and of unequal work where huge samples are worth it, see
            `_uneven_targets`.
        """
        if self.step.max_samples is not None:
            return [[]]
        counts = self._counts()
        if self.evaluations_left == 0 or self.layout.pp == 1:
            return [[self._target(count, None) for count in counts]]
        per_round = 2 * max(1, len(counts)) * 2 * self.layout.pp
        rounds = min(_MAX_ROUNDS, self.evaluations_left // (_PROFILE_PART * per_round))
        targets = [self._target(count, max(1, rounds)) for count in counts]
        targets.sort(key=lambda t: t.seconds)
        enough = self.evaluations_left >= _UNEVEN_EVALUATIONS * self.layout.dp
        if self.layout.dp == 1 or not enough or not any(t.huge[0].size for t in targets):
            return [targets]
        return [targets, *self._uneven_targets(targets, max(1, rounds // 2))]

    def _uneven_targets(self, targets: list[_Target], rounds: int) -> list[list[_Target]]:
        """The same M with less work for ranks that have long samples.

        Returns:
            Targets with the same huge samples on each rank; and with those together on few ranks.
        """
        layout = self.layout
        share = self.cost.share_of_rank(layout)
        kinds: list[list[_Target]] = [[], []]
        # Packing and refining get about two thirds of what is left.
        least = self.evaluations_left * 2 // 3
        for target in targets:
            if self.evaluations_left < least:
                break
            count = target.num_microbatches
            # As many as `_huge` leaves to a rank.
            together = concentrated(self._heavy(count), layout.dp, max(count - 2, 0))
            known = target.profiles[0]
            for kind, huge, profile in zip(
                kinds, (target.huge, together), (known, None), strict=True
            ):
                uneven = find_uneven(
                    partial(self._profile, count, rounds),
                    self.divisible_runner.ops(count),
                    [share * own for own in huge],
                    work=share * self.total / layout.dp,
                    fixed=self.cost.fixed,
                    cap=share * self.cap,
                    heavy_profile=profile,
                )
                if uneven is None:
                    continue
                self.evaluations_left -= uneven.evaluations
                heavy, light = uneven.profiles
                num_light = layout.dp - uneven.num_heavy
                profiles = [heavy] * uneven.num_heavy + [light] * num_light
                kind.append(_Target(huge, profiles, uneven.shares, uneven.seconds))
        return [sorted(kind, key=lambda t: t.seconds) for kind in kinds]

    def _profile(self, count: int, rounds: int, work: float, huge: Floats) -> Profile:
        """The profile of a rank with this work and these huge samples, in seconds."""
        return find_profile(
            self.divisible_runner,
            count,
            work=work,
            fixed=self.cost.fixed,
            cap=self.cost.share_of_rank(self.layout) * self.cap,
            huge=huge,
            rounds=rounds,
        )

    def _counts(self) -> list[int]:
        """Legal values of M to try: from the smallest to where more cannot be faster."""
        layout = self.layout
        least = self.least_count
        most = self.items.num_items // layout.dp
        if least > most:
            return []
        best = least if self.step.by_tokens or layout.pp == 1 else self._closed_form()
        if self.evaluations == 0:
            wanted = [max(least, min(best, most, 2 * least)), least]
        else:
            top = max(least, min(most, 2 * best, _MAX_GROWTH * least))
            wanted = spread_counts(least, top, _MAX_COUNTS)
        if layout.pp == 1 or self.step.by_tokens:
            # No bubble is counted, so more micro-batches gain little: from 16 on 16, 17 and 19.
            wanted = [least, least + 1, least + 2 + least // 16]
        legal = [self.step.legal_count(count) for count in wanted]
        return [count for count in dict.fromkeys(legal) if count <= most]

    def _closed_form(self) -> int:
        """The fastest M for equal micro-batches: sqrt(work * (pp - 1) / (vpp * fixed)).

        `work` is the forward of all of a rank's rows through one chunk. On pp=4 and vpp=1, 0.3 s of
        work and 1 ms of fixed cost give sqrt(0.3 * 3 / 0.001) = 30.
        """
        layout = self.layout
        overhead = self.cost.fixed * layout.vpp
        if overhead <= 0:
            return self.items.num_items
        work = self.total / (layout.num_chunks * layout.cp * layout.dp)
        best = math.sqrt(work * (layout.pp - 1) / overhead)
        # At most one row per item: a tiny overhead gives infinity.
        return max(1, round(min(best, float(self.items.num_items))))

    def _huge(self, count: int) -> list[Floats]:
        """Assign items of more work than a mean row to ranks, heaviest first, to the least loaded.

        Returns:
            The work of each rank's items, in descending order; empty if all ranks have the same
            targets.
        """
        dp = self.layout.dp
        if self.same_targets:
            return [np.zeros(0)] * dp
        heavy = self._heavy(count)
        rank_of = lightest_ranks(heavy, dp)
        by_rank = heavy[by_row(rank_of, dp)]
        ends = np.cumsum(np.bincount(rank_of, minlength=dp)).tolist()
        # Two micro-batches are left for the other items.
        most = max(count - 2, 0)
        begins = [0, *ends[:-1]]
        return [by_rank[a : min(b, a + most)] for a, b in zip(begins, ends, strict=True)]

    def _heavy(self, count: int) -> Floats:
        """Work of the items that have more than a mean row, in descending order."""
        mean = self.total / (self.layout.dp * count)
        return self.work[self.order[: int(np.count_nonzero(self.work > mean))]]

    def _target(self, count: int, rounds: int | None) -> _Target:
        """The target of one M; with `rounds=None` its profile is not searched."""
        layout = self.layout
        huge = self._huge(count)
        if rounds is None or self.uniform or layout.pp == 1:
            profile = default_profile(layout, count, huge[0].size)
        else:
            share = self.cost.share_of_rank(layout)
            work = share * self.total / layout.dp
            profile = self._profile(count, rounds, work, share * huge[0])
            self.evaluations_left -= profile.evaluations
        even = np.ones(layout.dp)
        return _Target(huge, [profile] * layout.dp, even, profile.seconds)

    def _pack(self, target: _Target, shares: Floats) -> Draft | None:
        """A draft of rows packed to a target; None if the items do not fit.

        Args:
            shares: float64 [dp], factors on the target's shares of the work; their mean is 1.
        """
        dp = self.layout.dp
        count = target.num_microbatches
        shares = target.shares * shares
        shares = shares * (dp / float(np.cumsum(shares)[-1]))
        targets = np.array(
            [
                profile.targets(share * self.total / dp, huge, self.cap)
                for profile, share, huge in zip(
                    target.profiles, shares.tolist(), target.huge, strict=True
                )
            ]
        )
        if self.uniform:
            targets[:] = self.total / (dp * count)
        row_of = pack_to_targets(
            self.items.aligned,
            self.work,
            targets.ravel(),
            self.step.capacity,
            order=self.order,
        )
        if row_of is None:
            return None
        if self.same_targets:
            return self._distributed(row_of, dp * count, targets[0])
        row_work = self._row_work(row_of, dp * count).reshape(dp, count)
        heaviest_first = np.argsort(-row_work, axis=1, kind="stable")
        ranks = heaviest_first + np.arange(dp)[:, None] * count
        return self._draft(row_of, order_by_target(ranks, targets))

    def _split(self, row_of: Ints, num_rows: int) -> Draft:
        """A draft of these rows, split until they fill the smallest legal M."""
        wanted = self.layout.dp * self.least_count
        row_of, num_rows = split_heaviest(row_of, num_rows, wanted, self.work)
        return self._distributed(row_of, num_rows, np.ones(self.least_count))

    def _distributed(self, row_of: Ints, num_rows: int, targets: Floats) -> Draft:
        """A draft that assigns rows to ranks so that these have about equal work.

        Args:
            targets: float64 [M], relative work by position; they order each rank's rows.
        """
        row_work = self._row_work(row_of, num_rows)
        ranks = rows_to_ranks(row_work, self.layout.dp, in_rounds=self.lockstep)
        return self._draft(row_of, (order_by_target(rows, targets) for rows in ranks))

    def _row_work(self, row_of: Ints, num_rows: int) -> Floats:
        """float64 [R]: work of each row."""
        row_work = np.bincount(row_of, weights=self.items.work, minlength=num_rows)
        return row_work.astype(np.float64, copy=False)

    def _draft(self, row_of: Ints, rank_rows: Iterable[Ints]) -> Draft:
        return Draft(items=self.items, row_of=row_of, rank_rows=tuple(rank_rows))

    def _over_live_cap(self) -> PlanError:
        cap = self.policy.max_live_tokens_per_gpu
        layout = self.layout
        return PlanError(
            f"step {self.step.number}: no plan found stays within max_live_tokens_per_gpu={cap} "
            f"with samples of up to {int(self.items.aligned.max())} padded tokens on "
            f"pp={layout.pp}, vpp={layout.vpp}, cp={layout.cp}; raise it or set a larger cp"
        )
