"""The search for a step's fastest legal draft.

    counts (M) and groups (G) worth a look  -> profile of each, for divisible work
    the best few                            -> samples packed to the profile, dealt, ordered, scored
    the best one                            -> refined by moves until the evaluations are spent

An evaluation is one simulated rank. `Policy.search` is their number per step; with 0 the profile
is a canned one, at a count from the closed form of equal micro-batches. Ranks of a dense model meet
only in the gradient reduction, so under count_rule="per_rank" each rank may then get a number of
micro-batches of its own.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from megapack.base.arrays import Floats, Ints
from megapack.cost.model import TOKENS
from megapack.errors import PlanError
from megapack.pipeline.kernels import rank_seconds
from megapack.pipeline.simulator import Runner
from megapack.planner.bins import first_fit, pack_to_targets
from megapack.planner.counts import fewest_rows, halves, least_count, rank_counts, split_heaviest
from megapack.planner.partition import deal, deal_samples, place_by_target
from megapack.planner.problem import StepDraft, StepProblem
from megapack.planner.profile import Profile, canned_profile, find_profile
from megapack.planner.scored import Scored, score_draft
from megapack.planner.state import row_seconds

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
    huge: list[Floats]
    """Per rank the work of samples that take a place of their own, falling."""
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
        # Ranks that meet, or rows of one length: targets are the same on all of them.
        self.alike = self.lockstep or self.uniform
        self.falling = np.sort(self.work)[::-1]
        self.total = float(np.cumsum(self.work)[-1])
        # What a full row works, if its samples are like the others.
        self.cap = self.total * problem.capacity / int(problem.aligned.sum())
        self.runner = Runner(self.layout, self.cost, problem.forward_only)
        self.left = self.policy.search
        self.fewest, self.num_fewest = fewest_rows(problem)

    def run(self) -> StepDraft:
        capped = self.policy.max_live_tokens_per_gpu is not None
        if self.left < 2 * self.layout.dp and not capped:
            # Not enough to score two drafts.
            return next(self._drafts())[1]
        found = self._scored_drafts()
        best = self._best(found)
        if best.seconds == math.inf:
            raise self._over_live_cap()
        if self.policy.count_rule == "per_rank" and not self.uniform and self.left > 0:
            best = self._with_own_counts(best)
            found.append(best)
        return self._refined(best, found).draft

    def _scored_drafts(self) -> list[Scored]:
        found: list[Scored] = []
        for shape, draft in self._drafts():
            scored = self._score(draft)
            if shape is not None and not self.alike:
                scored = self._evened(shape, scored)
            found.append(scored)
            if self.left < 2 * self.layout.dp and self._best(found).seconds < math.inf:
                break
        return found

    def _best(self, found: list[Scored]) -> Scored:
        """Least seconds; more micro-batches must gain something where no bubble is counted."""
        if self.layout.pp > 1 and not self.by_tokens:
            return min(found, key=lambda s: s.seconds)
        fewest = min(s.num_microbatches for s in found)
        extra = {False: 1.0, True: 1 + _LEAST_GAIN}
        return min(found, key=lambda s: s.seconds * extra[s.num_microbatches > fewest])

    def _refined(self, best: Scored, found: list[Scored]) -> Scored:
        """Moves on the best draft and on the best of those with the fewest micro-batches."""
        fewest = min(s.num_microbatches for s in found)
        other = min((s for s in found if s.num_microbatches == fewest), key=lambda s: s.seconds)
        if other is not best and other.seconds < math.inf:
            for contender in (best, other):
                self._refine(contender, self.left // 4)
            best = self._best([best, other])
        self._refine(best, self.left)
        return best

    def _refine(self, scored: Scored, budget: int) -> None:
        if budget > 0:
            self.left -= scored.refine(self.runner, budget, self.lockstep)

    def _score(self, draft: StepDraft) -> Scored:
        self.left -= self.layout.dp
        return score_draft(self.problem, self.cost, self.runner, draft, self.lockstep)

    def _evened(self, shape: _Shape, best: Scored) -> Scored:
        """Pack again with less work for slow ranks while that helps."""
        shares, scored, misses = np.ones(self.layout.dp), best, 0
        for _ in range(_MAX_EVENED):
            seconds = scored.state.seconds
            if not np.isfinite(seconds).all() or not seconds.max() > 0:
                break
            mean = float(np.cumsum(seconds)[-1]) / seconds.size
            even = float(seconds.max()) < mean * _EVEN
            if even or misses > 1 or self.left < 2 * self.layout.dp:
                break
            shares = np.maximum(shares * (1 - (seconds - mean) / seconds.max()), 0.01)
            draft = self._pack(shape, shares * (shares.size / float(np.cumsum(shares)[-1])))
            if draft is None:
                break
            scored = self._score(draft)
            misses += scored.seconds >= best.seconds
            best = min(best, scored, key=lambda s: s.seconds)
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
        yield from self._dealt_by_sample()
        rows = [(self.fewest, self.num_fewest)]
        if self.layout.pp == 1 and self.problem.max_samples is None:
            # In input order rows are mixtures, and so more alike than sorted ones.
            mixed = first_fit(self.problem.aligned, self.problem.capacity)
            if mixed[1] <= int(rank_counts(self.problem, self.num_fewest, 1).sum()):
                rows.insert(0, mixed)
        yield from ((None, self._split(*row, group)) for row in rows for group in self._groups())

    def _dealt_by_sample(self) -> Iterator[tuple[None, StepDraft]]:
        """Without a pipeline ranks' sums are all that counts."""
        problem, dp = self.problem, self.layout.dp
        if self.layout.pp > 1 or self.alike or problem.max_samples is not None:
            return
        count = least_count(problem, self.num_fewest, self.layout.group_size)
        row_of = deal_samples(problem.aligned, self.work, dp, count, problem.capacity)
        if row_of is not None:
            ranks = np.arange(dp * count).reshape(dp, count)
            yield None, self._draft(row_of, ranks, self.layout.group_size)

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
        most = self.problem.num_items // layout.dp
        if least > most:
            return []
        best = least if self.by_tokens or layout.pp == 1 else self._closed_form()
        if self.policy.search == 0:
            wanted = [max(least, min(best, most, 2 * least)), least]
        else:
            top = max(least, min(most, 2 * best, _MAX_GROWTH * least))
            # Closer where they are small; in integers, as a power may differ between machines.
            last = _MAX_COUNTS - 1
            wanted = [least + (top - least) * k * k // (last * last) for k in range(last + 1)]
        if layout.pp == 1 or self.by_tokens:
            wanted = [least, least + 1, least + 2 + least // 16]
        legal = [layout.next_legal_count(count, rule, group) for count in wanted]
        return [count for count in dict.fromkeys(legal) if count <= most]

    def _closed_form(self) -> int:
        """M of least seconds for equal micro-batches: sqrt(work * (pp - 1) / (vpp * fixed))."""
        layout = self.layout
        overhead = self.cost.fixed * layout.vpp
        if overhead <= 0:
            return self.problem.num_items
        work = self.total / (layout.num_chunks * layout.cp * layout.dp)
        best = math.sqrt(work * (layout.pp - 1) / overhead)
        # More than a row for each item is never asked for; an overhead next to none gives infinity.
        return max(1, round(min(best, float(self.problem.num_items))))

    def _huge(self, count: int) -> list[Floats]:
        """Per rank the work of samples above a mean row, falling: heaviest first to the rank with
        least of them. None where ranks are to be alike."""
        ranks: list[list[float]] = [[] for _ in range(self.layout.dp)]
        loads = [(0.0, rank) for rank in range(self.layout.dp)]
        mean = self.total / (self.layout.dp * count)
        huge = self.falling[self.falling > mean].tolist() if not self.alike else []
        for work in huge:
            load, rank = loads[0]
            # Two places are left for the others.
            if len(ranks[rank]) < count - 2:
                ranks[rank].append(work)
            heapq.heapreplace(loads, (load + work, rank))
        return [np.array(rank) for rank in ranks]

    def _shape(self, count: int, group: int, rounds: int | None) -> _Shape:
        layout, huge = self.layout, self._huge(count)
        counts = np.full(layout.dp, count, dtype=np.int64)
        if rounds is None or self.uniform or layout.pp == 1:
            profile = canned_profile(layout, count, group, huge[0].size)
            return _Shape(counts, group, huge, profile)
        share = 1.0 / (layout.num_chunks * layout.cp)
        profile = find_profile(
            self.runner,
            count,
            group,
            work=share * self.total / layout.dp,
            fixed=self.cost.fixed,
            cap=share * self.cap,
            huge=share * huge[0],
            rounds=rounds,
        )
        self.left -= profile.evaluations
        return _Shape(counts, group, huge, profile)

    def _pack(self, shape: _Shape, shares: Floats) -> StepDraft | None:
        """Samples packed to a shape; `shares` of work per rank have mean 1."""
        dp, count = self.layout.dp, int(shape.counts[0])
        targets = np.array(
            [
                shape.profile.targets(share * self.total / dp, huge, self.cap)
                for share, huge in zip(shares.tolist(), shape.huge, strict=True)
            ]
        )
        if self.uniform:
            targets[:] = self.total / (dp * count)
        row_of = pack_to_targets(
            self.problem.aligned, self.work, targets.ravel(), self.problem.capacity
        )
        if row_of is None:
            return None
        if self.alike:
            return self._dealt(row_of, dp * count, shape.counts, shape.group, targets[0])
        row_work = self._row_work(row_of, dp * count).reshape(dp, count)
        heaviest_first = np.argsort(-row_work, axis=1, kind="stable")
        ranks = heaviest_first + np.arange(dp)[:, None] * count
        rows = (place_by_target(*pair) for pair in zip(ranks, targets, strict=True))
        return self._draft(row_of, rows, shape.group)

    def _split(self, row_of: Ints, num_rows: int, group: int) -> StepDraft:
        """Rows split up to the counts of the fewest rows."""
        counts = rank_counts(self.problem, self.num_fewest, group)
        row_of, num_rows = split_heaviest(row_of, num_rows, int(counts.sum()), self.work)
        return self._dealt(row_of, num_rows, counts, group, None)

    def _dealt(
        self, row_of: Ints, num_rows: int, counts: Ints, group: int, levels: Floats | None
    ) -> StepDraft:
        ranks = deal(self._row_work(row_of, num_rows), counts, in_rounds=self.lockstep)
        rank_rows = [
            place_by_target(rows, np.ones(count) if levels is None else levels)
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


def adjust_counts(problem: StepProblem, scored: Scored, runner: Runner, budget: int) -> StepDraft:
    """Change ranks' counts while it pays and evaluations are left.

    Args:
        budget: simulations that may be spent.
    """
    return _Adjuster(problem, scored, runner, budget).run()


class _Adjuster:
    def __init__(self, problem: StepProblem, scored: Scored, runner: Runner, budget: int) -> None:
        self.problem, self.runner, self.left, self.scored = problem, runner, budget, scored
        self.group = scored.draft.group_size
        row_of = scored.draft.row_of
        order = np.argsort(row_of, kind="stable")
        self.members = np.split(order, np.cumsum(np.bincount(row_of))[:-1])
        self.ranks = [rows.tolist() for rows in scored.draft.rank_rows]

    def run(self) -> StepDraft:
        for rank in range(len(self.ranks)):
            while self.left > 0 and self._improve(rank):
                pass
        # Rows that were merged away leave gaps; number the others again.
        used = [row for rows in self.ranks for row in rows if row >= 0]
        number = {row: k for k, row in enumerate(used)}
        row_of = np.empty(self.problem.num_items, dtype=np.int64)
        for row, k in number.items():
            row_of[self.members[row]] = k
        ranks = tuple(np.array([number.get(row, -1) for row in rows]) for rows in self.ranks)
        return StepDraft(row_of=row_of, rank_rows=ranks, group_size=self.group)

    def _improve(self, rank: int) -> bool:
        before = self._seconds(self.ranks[rank])
        return self._merge(rank, before) or self._split(rank, before)

    def _merge(self, rank: int, before: float) -> bool:
        """Put the two shortest neighbours into one row."""
        rows = self.ranks[rank]
        if not self._legal(len(rows) - 1):
            return False
        tokens = [self._tokens(row) for row in rows]
        at = min(range(len(rows) - 1), key=lambda k: (tokens[k] + tokens[k + 1], k))
        a, b = rows[at], rows[at + 1]
        capacity = self.problem.capacity
        if min(a, b) < 0 or capacity < 0 or tokens[at] + tokens[at + 1] > capacity:
            return False
        both = np.sort(np.concatenate([self.members[a], self.members[b]]))
        old, self.members[a] = self.members[a], both
        shorter = [*rows[: at + 1], *rows[at + 2 :]]
        if self._seconds(shorter) < before:
            self.ranks[rank] = shorter
            return True
        self.members[a] = old
        return False

    def _split(self, rank: int, before: float) -> bool:
        """Cut the row of most seconds in two, the halves beside each other."""
        rows = self.ranks[rank]
        seconds = [self._row_seconds(row) for row in rows]
        at = max(range(len(rows)), key=lambda k: (seconds[k], -k))
        row = rows[at]
        if not self._legal(len(rows) + 1) or row < 0 or self.members[row].size < 2:
            return False
        old = self.members[row]
        self.members[row], leaving = halves(old, self.problem.work.tolist())
        self.members.append(leaving)
        longer = [*rows[: at + 1], len(self.members) - 1, *rows[at + 1 :]]
        if self._seconds(longer) < before:
            self.ranks[rank] = longer
            return True
        self.members[row] = old
        self.members.pop()
        return False

    def _legal(self, count: int) -> bool:
        return count >= 1 and self.problem.layout.is_legal_count(count, self.group)

    def _tokens(self, row: int) -> int:
        return int(self.problem.aligned[self.members[row]].sum()) if row >= 0 else 0

    def _row_seconds(self, row: int) -> float:
        items: Ints = self.members[row] if row >= 0 else np.zeros(0, dtype=np.int64)
        problem = self.problem
        parts = (problem.aligned, problem.aligned_sq, problem.num)
        return float(row_seconds(self.scored.cost, *(int(part[items].sum()) for part in parts)))

    def _seconds(self, rows: list[int]) -> float:
        self.left -= 1
        ops = self.runner.ops(len(rows), self.group)
        forward = np.array([self._row_seconds(row) for row in rows])
        return float(rank_seconds(ops, forward, np.empty(ops.stage.size)))
