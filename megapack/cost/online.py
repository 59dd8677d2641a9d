"""`OnlineFit`: a cost model from a run's own seconds, by least squares with forgetting.

    seconds of a step's rows -> sums, additive over ranks and steps -> CostModel

The forward of a chunk takes `weight * (x . theta)` seconds, where theta holds `fixed`, `per_token`,
`per_token_sq` and `per_sample`, and what rows over several DP ranks cost more: `per_token` times
`cp_overhead`, and `cp_fixed`. x is 1 and the row's sizes, divided over chunks and ranks, its tokens
once more for each further rank, and 1 for a row over several; squares count by the chunk's factor,
which its layers decide and no fit changes. The fit minimises the sum of squared relative errors, so
that a short row counts as much as a long one.
For one chunk and kind of operation this sum is a quadratic form, of which the sums of x x^T / y^2
and x / y over the rows are all that is needed. They are 42 numbers, however many rows there are.
Sums of earlier steps are multiplied by a factor below 1 in each step (recursive least squares with
exponential forgetting; Ljung and Soderstrom 1983, chapter 2).

The model is a product of weights, coefficients and ratios. Each of them is fitted with the others
held fixed, in turn, until nothing moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from megapack.base.arrays import Floats
from megapack.cost.fit import Measurement
from megapack.cost.model import CostModel
from megapack.layout import Layout

HALF_LIFE_STEPS = 20.0
"""Steps after which seconds count half. 20 steps of 8 ranks with 16 rows are 2,560 forwards."""

# The kinds of operations that have sums of their own; weight gradients that were measured apart.
_FORWARD, _BACKWARD, _WEIGHTS = range(3)
_NUM_KINDS = 3
_NUM_FEATURES = 6
_NUM_SQUARES = _NUM_FEATURES * _NUM_FEATURES
# Sums of x x^T / y^2, of x / y, and the number of rows.
_SIZE = _NUM_SQUARES + _NUM_FEATURES + 1
# Rounds over weights, coefficients and ratios. Constants three times off need about 10.
_ROUNDS = 30
# The model in force counts as much as this share of the rows. It decides what the rows leave open,
# such as `per_sample` against `fixed` where every row holds one sample.
_PRIOR = 1e-3
# The past is forgotten at once if the model of a window alone is this much better in the window
# than that of all steps: a GPU's clock changed, or a neighbour on the node. If it alone is 5 % off,
# 15 % is too much. Chosen by hand.
_CHANGED_TIMES = 2.0
_CHANGED_BY = 0.05
# Weight gradients have no part per squared token: attention has no weights.
_WITHOUT_ATTENTION = np.array([1.0, 1.0, 0.0, 1.0, 0.0, 0.0])


class ChunkSeconds(NamedTuple):
    """What a chunk took for a row."""

    chunk: int
    """Its position in the model, from 0 to pp*vpp - 1."""
    row: Measurement


class OnlineFit:
    """Fits a cost model to the seconds of a run, window by window.

        window = fit.window([steps' sums of this rank])     # added up over all ranks
        model = fit.take(window, num_steps)

    Args:
        layout: the layout of the run.
        start: the model to begin with. What no row tells keeps its values.

    Attributes:
        model: the model in force: the result of the last `take`, or `start`.
        sums: float64 [pp*vpp, 3, 43], sums of all steps that were taken, earlier ones faded.
    """

    def __init__(self, layout: Layout, start: CostModel) -> None:
        self.model = start
        self.sums: Floats = np.zeros((layout.num_chunks, _NUM_KINDS, _SIZE))
        self._layout = layout
        self._factors = start.factors_for(layout)
        self._keep = 0.5 ** (1.0 / HALF_LIFE_STEPS)

    def window(self, steps: Sequence[Sequence[ChunkSeconds]]) -> Floats:
        """Sums over the steps of a window, as they count at its end; they add up over ranks.

        Args:
            steps: this rank's rows, step by step; none for a step that is left out.
        """
        total = np.zeros_like(self.sums)
        for rows in steps:
            total *= self._keep
            self._add(total, rows)
        return total

    def candidate(self, window: Floats, num_steps: int) -> CostModel:
        """The model that `take` would put into force.

        Args:
            window: see `window`, of all ranks.
            num_steps: steps of the window.
        """
        return self._fitted(window, num_steps)[1]

    def take(self, window: Floats, num_steps: int) -> CostModel:
        """Add the sums of a window and put the model that they give into force.

        Where the window does not look like the steps before it, these are forgotten.
        """
        self.sums, self.model = self._fitted(window, num_steps)
        return self.model

    def _fitted(self, window: Floats, num_steps: int) -> tuple[Floats, CostModel]:
        sums = self.sums * self._keep**num_steps + window
        model = _solve(sums, self.model, self._layout)
        alone = _solve(window, self.model, self._layout)
        error = relative_error(window, model, self._layout)
        least = relative_error(window, alone, self._layout)
        if error is None or least is None:
            return sums, model
        # As many rows as there are coefficients, weights and the ratio fit without an error.
        num_rows = float(window[:, :_WEIGHTS, -1].sum())
        freedom = 1.0 - (len(sums) + _NUM_FEATURES + 1) / num_rows
        if freedom > 0 and error > _CHANGED_TIMES * least / freedom**0.5 + _CHANGED_BY:
            return window, alone
        return sums, model

    def _add(self, total: Floats, rows: Sequence[ChunkSeconds]) -> None:
        for chunk, row in rows:
            x = _features(self._layout, row, self._factors[chunk])
            _add_row(total[chunk, _FORWARD], x, row.forward_seconds)
            if row.backward_seconds is not None:
                _add_row(total[chunk, _BACKWARD], x, row.backward_seconds)
            if row.weight_seconds is not None and row.width == 1:
                _add_row(total[chunk, _WEIGHTS], x * _WITHOUT_ATTENTION, row.weight_seconds)


def relative_error(sums: Floats, model: CostModel, layout: Layout) -> float | None:
    """Root mean square of predicted over measured seconds minus 1.

    Args:
        sums: see `OnlineFit.window`.

    Returns:
        None if there is no row.
    """
    theta = _theta(model)
    weights = np.array(model.weights_for(layout))
    total = 0.0
    count = 0.0
    for kind, ratio in ((_FORWARD, 1.0), (_BACKWARD, model.backward_ratio)):
        squares, products, counts = _parts(sums[:, kind])
        scale = weights * ratio
        total += float(scale**2 @ _quadratic(squares, theta) - 2 * scale @ (products @ theta))
        count += float(counts.sum())
    return max(0.0, (total + count) / count) ** 0.5 if count else None


def predicted_seconds(rows: Sequence[ChunkSeconds], model: CostModel, layout: Layout) -> float:
    """Seconds that a model gives for the forwards and backwards of these rows."""
    weights = model.weights_for(layout)
    factors = model.factors_for(layout)
    total = 0.0
    for chunk, row in rows:
        forward = weights[chunk] * model.forward_seconds(
            layout,
            row_tokens=row.row_tokens,
            tokens_sq=row.tokens_sq,
            num_samples=row.num_samples,
            width=row.width,
            square_factor=factors[chunk],
        )
        total += forward
        if row.backward_seconds is not None:
            total += forward * model.backward_ratio
    return total


def measured_seconds(rows: Sequence[ChunkSeconds]) -> float:
    """Seconds that the forwards and backwards of these rows took."""
    return sum(row.forward_seconds + (row.backward_seconds or 0.0) for _, row in rows)


def _features(layout: Layout, row: Measurement, square_factor: float) -> Floats:
    share = CostModel.share_of_rank(layout, row.width)
    tokens, tokens_sq, num_samples = (share * float(size) for size in row.sizes)
    more_ranks = row.width - 1
    return np.array(
        [1.0, tokens, square_factor * tokens_sq, num_samples, more_ranks * tokens, more_ranks > 0]
    )


def _add_row(sums: Floats, x: Floats, seconds: float) -> None:
    relative = x / seconds
    sums[:_NUM_SQUARES] += np.outer(relative, relative).ravel()
    sums[_NUM_SQUARES:-1] += relative
    sums[-1] += 1.0


def _parts(sums: Floats) -> tuple[Floats, Floats, Floats]:
    """Sums of one kind [chunks, 43] as [chunks, 6, 6], [chunks, 6] and [chunks]."""
    squares = sums[:, :_NUM_SQUARES].reshape(-1, _NUM_FEATURES, _NUM_FEATURES)
    return squares, sums[:, _NUM_SQUARES:-1], sums[:, -1]


def _quadratic(squares: Floats, theta: Floats) -> Floats:
    """theta^T S theta of each chunk: [chunks]."""
    result: Floats = np.einsum("i,cij,j->c", theta, squares, theta)
    return result


def _theta(model: CostModel) -> Floats:
    rates = (model.fixed, model.per_token, model.per_token_sq, model.per_sample)
    return np.array([*rates, model.per_token * model.cp_overhead, model.cp_fixed])


def _solve(sums: Floats, start: CostModel, layout: Layout) -> CostModel:
    """The model of least relative error; `start` where the sums tell nothing."""
    squares_f, products_f, counts = _parts(sums[:, _FORWARD])
    squares_b, products_b, _ = _parts(sums[:, _BACKWARD])
    num_rows = float(counts.sum())
    if num_rows == 0:
        return start
    # In units of its root mean square share of a row's seconds, each coefficient is about 1.
    size = np.sqrt(np.einsum("cii->i", squares_f) / num_rows)
    unit = np.divide(1.0, size, out=np.zeros_like(size), where=size > 0)
    prior = _theta(start) * size
    weights = np.array(start.weights_for(layout))
    ratio = start.backward_ratio
    theta = _theta(start)
    for _ in range(_ROUNDS):
        squares = squares_f + ratio**2 * squares_b
        products = products_f + ratio * products_b
        theta = unit * _least_squares(
            np.einsum("c,cij->ij", weights**2, squares) * np.outer(unit, unit),
            weights @ products * unit,
            prior,
            _PRIOR * num_rows,
        )
        curvature = _quadratic(squares, theta)
        weights = np.divide(products @ theta, curvature, out=weights, where=curvature > 0)
        mean = float(weights.mean())
        weights = weights / mean
        theta = theta * mean
        curvature_b = float(weights**2 @ _quadratic(squares_b, theta))
        if curvature_b > 0:
            ratio = float(weights @ (products_b @ theta)) / curvature_b
    fixed, per_token, per_token_sq, per_sample, per_further, cp_fixed = theta.tolist()
    over_ranks = {}
    if size[-1] > 0 and per_token > 0:
        over_ranks = {"cp_overhead": per_further / per_token, "cp_fixed": cp_fixed}
    return replace(
        start,
        fixed=fixed,
        per_token=per_token,
        per_token_sq=per_token_sq,
        per_sample=per_sample,
        backward_ratio=ratio,
        stage_weights=tuple(weights.tolist()),
        **over_ranks,
        weight_ratio=_weight_ratio(sums, theta, weights, start.weight_ratio),
        fit_error=None,
    )


def _least_squares(squares: Floats, products: Floats, prior: Floats, strength: float) -> Floats:
    """z >= 0 of least z^T S z - 2 p^T z + strength * |z - prior|^2 (Lawson and Hanson 1974)."""
    from scipy.optimize import nnls

    # With S = L L^T this is |L^T z - L^-1 p|^2 plus a constant.
    lower = np.linalg.cholesky(squares + strength * np.eye(_NUM_FEATURES))
    solution: Floats = nnls(lower.T, np.linalg.solve(lower, products + strength * prior))[0]
    return solution


def _weight_ratio(sums: Floats, theta: Floats, weights: Floats, before: float) -> float:
    """Seconds of weight gradients over those of the forward without attention."""
    squares, products, counts = _parts(sums[:, _WEIGHTS])
    curvature = float(weights**2 @ _quadratic(squares, theta))
    slope = float(weights @ (products @ theta))
    held = _PRIOR * float(counts.sum())
    return max(0.0, (slope + held * before) / (curvature + held)) if held else before
