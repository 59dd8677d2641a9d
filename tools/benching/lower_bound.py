"""A lower bound on a step's seconds: what no plan of whole samples in Megatron's order can beat.

It holds for every assignment of samples to ranks, rows and places in a rank's order, and for every
legal number of micro-batches M that all ranks share. Rows over several DP ranks, pieces of samples
and split backwards have more freedom, so their plans may be faster.

The bound relaxes the problem until linear programs (LPs) solve it:

- Work is divisible: the forward seconds of a rank's rows are free, only their sum is given. The LP
  of one M finds the most row seconds that a rank can run in one second; its variables are the rows
  and the end of each operation. A profile of 16 rows on pp=4 takes at least 1.1085 times as long as
  the work of a stage.
- The longest sample of a rank, its peak, is whole: one row takes at least its seconds. The place of
  that row is free, so the bound is the best over all places. A window of rows around the peak is in
  the LP. The rows before and after it are two sums, and each stage is only known to be busy with
  them: that covers every M at least as large as the window.
- Peaks: the longest sample is on some rank. If the first r ranks, by their peaks, can run the work
  of the j longest samples but not that of j + 1, rank r + 1 has a peak of at least sample j + 1.
- An M is possible within T seconds only if the ranks can run the work of all samples in T. The
  least T of each M is found by bisection, and the bound is the least over M.

Nothing depends on the samples but the peaks, so the LPs of a layout serve all its cells. Transfers
between stages (`CostModel.p2p`) count as 0 s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.optimize import OptimizeResult, linprog
from scipy.sparse import coo_matrix

from megapack.base.arrays import Floats, Ints
from megapack.cost.model import CostModel
from megapack.layout import Layout
from megapack.pipeline.kernels import RankOps
from megapack.pipeline.simulator import Runner

# Groups of rows on each side of a peak. More rows see more of the way up to the peak and down: on
# pp=4, 16 bound a peak of 1/60 of a step's seconds to 0.950 of the full speed, 4 to 0.980. A peak
# in at most 2 * 4 rows has all of them in its window. Deeper pipelines have larger groups.
_SIDES = {False: (4, 8, 16), True: (1, 2, 4)}
# Chunks above which only the first of these windows is used: with pp=8 and vpp=4 it has 24 rows of
# 32 chunks, and its LP takes 0.5 s.
_MAX_CHUNKS = 8
# Seconds of a peak, as parts of the longest that the pipeline lets through in one second. Between
# two of them the bound is the lower of two tangents.
_PEAKS = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95)
# Most forwards of a rank in the LP of all its rows, per row of a group: M=100 on pp=4 without vpp,
# and with pp=8 and vpp=4, whose legal M are 8 apart. Larger M: the mean row is a peak.
_MAX_FORWARDS = 400
# Operations above which the interior-point solver is faster: with pp=8, vpp=4 and M=112, 7,168 of
# them take it 4 s and the simplex method 8 s.
_MANY_OPERATIONS = 3000
# Bisections stop here; the result is lowered by as much as solvers may be wrong.
_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Bound:
    """The least seconds of a step."""

    seconds: float
    num_microbatches: int
    """M for which the bound is the lowest; plans with another M may be slower, not faster."""


def sample_seconds(lengths: Ints, layout: Layout, cost: CostModel) -> Floats:
    """float64 [n]: seconds of each sample in the forward of a row through one chunk of weight 1."""
    work = cost.per_token * lengths + cost.per_token_sq * lengths.astype(np.float64) ** 2
    return np.asarray((work + cost.per_sample) * cost.share_of_rank(layout), dtype=np.float64)


class LowerBounds:
    """Bounds of all steps of one layout and cost model; their LPs are solved once.

    Args:
        cost: its fixed seconds, weights of stages and backward ratio are used.

    Raises:
        ValueError: no fixed seconds, so that there is no largest M to look at; or chunks whose
            shares of attention differ.
    """

    def __init__(self, layout: Layout, cost: CostModel) -> None:
        if cost.fixed <= 0:
            raise ValueError(
                "a bound of a cost model with fixed=0; set the seconds of a micro-batch"
            )
        if cost.square_factors is not None:
            raise ValueError("a bound of chunks with square_factors; give a cost model without")
        self.layout = layout
        self.fixed = cost.fixed
        self._runner = Runner(layout, CostModel(backward_ratio=cost.backward_ratio))
        self._runner.weights = np.array(cost.weights_for(layout))
        self._group = layout.group_size if layout.vpp > 1 else 1
        self._even: dict[int, float] = {}
        self._windows: dict[tuple[int, int], _Tangents] = {}

    def of(self, seconds: Floats, least_count: int, beat: float = math.inf) -> Bound:
        """The bound of a step.

        Args:
            seconds: float64 [n], see `sample_seconds`.
            least_count: the fewest micro-batches, as by the token budget.
            beat: seconds of a known plan; larger bounds are of no interest.
        """
        layout = self.layout
        longest_first = np.sort(seconds)[::-1]
        fits = np.concatenate([[0.0], np.cumsum(longest_first)])
        mean = float(fits[-1]) / layout.dp
        best = Bound(beat, 0)
        count = layout.next_legal_count(max(1, least_count))
        while self._busiest * (count * self.fixed + mean) < best.seconds:
            # The cheap share of an M shows most of them to be no better than the best one so far.
            if self._is_possible(best.seconds, count, self._cheap_share(count), fits):
                share = self._even_share(count)
                if self._is_possible(best.seconds, count, share, fits):
                    best = Bound(self._least(best.seconds, count, share, fits), count)
            count = layout.next_legal_count(count + 1)
        return Bound(best.seconds * (1 - _TOLERANCE), best.num_microbatches)

    def _least(self, most: float, count: int, share: float, fits: Floats) -> float:
        """The fewest seconds, up to `most`, in which the ranks might run all samples."""
        low = (count * self.fixed + float(fits[-1]) / self.layout.dp) / share
        if math.isinf(most):
            most = low
            while not self._is_possible(most, count, share, fits):
                most *= 2
        while most > low * (1 + _TOLERANCE):
            middle = (low + most) / 2
            if self._is_possible(middle, count, share, fits):
                most = middle
            else:
                low = middle
        return low

    def _is_possible(self, seconds: float, count: int, share: float, fits: Floats) -> bool:
        """Whether the ranks might run all samples in this time, as far as the bound can tell.

        Args:
            fits: float64 [n + 1], work of the j longest samples.
        """
        if math.isinf(seconds):
            return True
        done = 0.0
        for _ in range(self.layout.dp):
            # Samples that the ranks so far have no time for: the longest is a peak of the next.
            peak_at = int(np.searchsorted(fits, done * (1 + _TOLERANCE), side="right")) - 1
            if peak_at == fits.size - 1:
                return True
            peak = float(fits[peak_at + 1] - fits[peak_at])
            part = min(share, self._peak_share(count, (peak + self.fixed) / seconds))
            work = seconds * part - count * self.fixed
            if work < peak * (1 - _TOLERANCE):
                return False
            done += work
        return done * (1 + _TOLERANCE) >= float(fits[-1])

    @cached_property
    def _busiest(self) -> float:
        """Seconds of the busiest stage for a row of 1 s."""
        return float(self._row_seconds.max())

    @cached_property
    def _row_seconds(self) -> Floats:
        """float64 [pp]: seconds of each stage for a row of 1 s: all its chunks, both passes."""
        runner = self._runner
        weights = runner.weights.reshape(self.layout.vpp, self.layout.pp).sum(axis=0)
        return np.asarray(weights * (1 + runner.backward_ratio))

    def _even_share(self, count: int) -> float:
        """The most row seconds per second of a rank with M rows."""
        if count * self.layout.num_chunks > _MAX_FORWARDS * self._group:
            return self._cheap_share(count)
        if count not in self._even:
            rows = _Rows(self._runner.ops(count, self._group), count, self._row_seconds)
            self._even[count] = rows.solve(0, 0.0).share
        return self._even[count]

    def _cheap_share(self, count: int) -> float:
        """The same without the LP of this M: one of M rows has at least the mean."""
        if count in self._even:
            return self._even[count]
        low = 0.0
        high = 1 / self._busiest
        if self._peak_share(count, high / count) >= high:
            return high
        while high - low > _TOLERANCE * high:
            middle = (low + high) / 2
            if self._peak_share(count, middle / count) >= middle:
                low = middle
            else:
                high = middle
        return high

    def _peak_share(self, count: int, peak: float) -> float:
        """The most row seconds per second of a rank with M rows, one of which takes `peak`."""
        if peak * float(self._row_seconds.sum()) > 1 + _TOLERANCE:
            return 0.0
        groups, rest = divmod(count, self._group)
        sides = _SIDES[self.layout.vpp > 1]
        if self.layout.num_chunks > _MAX_CHUNKS:
            sides = sides[:1]
        if self.layout.pp == 1 or (rest and groups > 2 * sides[0]):
            return 1 / self._busiest
        fitting = [side for side in sides if groups > 2 * side]
        # Few rows are all in the window.
        window = (fitting[-1], 0) if fitting else (0, count)
        if window not in self._windows:
            self._windows[window] = self._window(*window)
        return self._windows[window].share(peak)

    def _window(self, side: int, count: int) -> _Tangents:
        """The tangents of all places of a peak.

        Args:
            side: groups beside the peak, or fewer at the first or last row; 0 for all M rows.
            count: M, if all rows are in the window.
        """
        group = self._group
        # Rows in the window, places of the peak, and whether there may be rows before and after.
        cases = [(count, range(count), False, False)]
        if side:
            numbers = [(side, side)]
            numbers += [(groups, side) for groups in range(side)]
            numbers += [(side, groups) for groups in range(side)]
            cases = [
                (
                    (before + 1 + after) * group,
                    range(before * group, (before + 1) * group),
                    before == side,
                    after == side,
                )
                for before, after in numbers
            ]
        longest = 1 / float(self._row_seconds.sum())
        values = []
        slopes = []
        for num_rows, places, more_before, more_after in cases:
            rows = _Rows(
                self._runner.ops(num_rows, group),
                num_rows,
                self._row_seconds,
                more_before=more_before,
                more_after=more_after,
            )
            for place in places:
                solved = [rows.solve(place, part * longest) for part in _PEAKS]
                values.append([one.share for one in solved])
                slopes.append([one.slope for one in solved])
        return _Tangents(longest * np.array(_PEAKS), np.array(values), np.array(slopes))


@dataclass(frozen=True)
class _Tangents:
    """The most row seconds per second as a function of the peak: concave for each place of it."""

    peaks_P: Floats
    shares_LP: Floats
    """By place of the peak and its size."""
    slopes_LP: Floats

    def share(self, peak: float) -> float:
        """An upper bound for all places of the peak: tangents lie above a concave function."""
        tangents_LP = self.shares_LP + self.slopes_LP * (peak - self.peaks_P)
        return float(tangents_LP.min(axis=1).max())


@dataclass(frozen=True)
class _Solved:
    share: float
    slope: float
    """Change of the share per second of the peak."""


class _Rows:
    """The LP of a rank's rows within one second.

    Its variables are the end of each operation, the seconds of each row, and the seconds of all
    rows before them and after them. Rows before, which are not in the operations, keep each stage
    busy for their seconds; an operation that would run between them has no effect on other stages
    then. The same holds for rows after.

    Args:
        row_seconds: float64 [pp], see `LowerBounds`.
        more_before: whether there may be rows before these.
    """

    def __init__(
        self,
        ops: RankOps,
        count: int,
        row_seconds: Floats,
        *,
        more_before: bool = False,
        more_after: bool = False,
    ) -> None:
        self.count = count
        self.num_ops = ops.stage.size
        self.bounds = np.zeros((self.num_ops + count + 2, 2))
        self.bounds[:, 1] = np.inf
        self.bounds[-2, 1] = np.inf if more_before else 0.0
        self.bounds[-1, 1] = np.inf if more_after else 0.0
        waits_for = ops.waits_for.copy()
        previous = np.full(self.num_ops, -1)
        last = []
        for stage in range(ops.pp):
            own = np.flatnonzero(ops.stage == stage)
            previous[own[1:]] = own[:-1]
            last.append(own[-1])
            is_forward = ops.held[own] > 0
            if more_before:
                # Before its first backward, a stage runs the last backwards of rows before.
                between = own[: int(np.argmin(is_forward)) - 1]
                waits_for[np.isin(ops.waits_for, between)] = self.num_ops
            if more_after:
                num_last = int(np.argmax(is_forward[::-1]))
                waits_for[own[own.size - num_last + 1 :]] = self.num_ops
        self._set_matrix(ops, waits_for, previous, np.array(last), row_seconds)

    def _set_matrix(
        self, ops: RankOps, waits_for: Ints, previous: Ints, last: Ints, row_seconds: Floats
    ) -> None:
        """Each operation ends after those before it; the last of each stage ends within 1 s."""
        after = np.flatnonzero(previous >= 0)
        waiting = np.flatnonzero(waits_for < self.num_ops)
        first = np.flatnonzero(previous < 0)
        op = np.concatenate([after, waiting, first])
        source = np.concatenate([previous[after], waits_for[waiting]])
        line = np.arange(op.size)
        end_line = op.size + np.arange(last.size)
        before = self.num_ops + self.count
        lines = [line, line, line[: source.size], line[source.size :], end_line, end_line]
        columns = [
            op,
            self.num_ops + ops.microbatch[op],
            source,
            np.full(first.size, before),
            last,
            np.full(last.size, before + 1),
        ]
        values = [
            np.full(op.size, -1.0),
            ops.scale[op],
            np.ones(source.size),
            row_seconds[ops.stage[first]],
            np.ones(last.size),
            row_seconds[ops.stage[last]],
        ]
        self.matrix = coo_matrix(
            (np.concatenate(values), (np.concatenate(lines), np.concatenate(columns))),
            shape=(op.size + last.size, before + 2),
        ).tocsr()
        self.limits = np.concatenate([np.zeros(op.size), np.ones(last.size)])

    def solve(self, place: int, peak: float) -> _Solved:
        """The most row seconds in one second if the row at `place` takes at least `peak`."""
        objective = np.zeros(self.bounds.shape[0])
        objective[self.num_ops :] = -1.0
        bounds = self.bounds.copy()
        bounds[self.num_ops + place, 0] = peak
        method = "highs-ipm" if self.num_ops > _MANY_OPERATIONS else "highs-ds"
        result: OptimizeResult = linprog(
            objective, A_ub=self.matrix, b_ub=self.limits, bounds=bounds, method=method
        )
        if result.status != 0:
            raise RuntimeError(f"no bound: {result.message}")
        return _Solved(-float(result.fun), -float(result.lower.marginals[self.num_ops + place]))
