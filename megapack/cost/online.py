"""A cost model from a run's own seconds, by least squares with forgetting.

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
from typing import Any, NamedTuple

import numpy as np

from megapack.base.arrays import Floats
from megapack.cost.fit import Measurement
from megapack.cost.model import CostModel
from megapack.layout import Layout

KEEP = 0.5 ** (1.0 / 20)
"""What sums of earlier steps are multiplied by in each step: seconds of 20 steps ago count half. 20
steps of 8 ranks with 16 rows are 2,560 forwards."""

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
# What theta begins with.
_RATES = ("fixed", "per_token", "per_token_sq", "per_sample")
# Weight gradients have no part per squared token: attention has no weights.
_WITHOUT_ATTENTION = np.array([1.0, 1.0, 0.0, 1.0, 0.0, 0.0])


class ChunkSeconds(NamedTuple):
    """What a chunk took for a row."""

    chunk: int
    """Its position in the model, from 0 to pp*vpp - 1."""
    row: Measurement


def row_sums(rows: Sequence[ChunkSeconds], model: CostModel, layout: Layout) -> Floats:
    """Sums of rows, float64 [pp*vpp, 3, 43], which add up over ranks and steps.

    Args:
        model: gives the factors of squares.
    """
    sums: Floats = np.zeros((layout.num_chunks, _NUM_KINDS, _SIZE))
    factors = model.factors_for(layout)
    for chunk, row in rows:
        x = _features(layout, row, factors[chunk])
        weight_seconds = row.weight_seconds if row.width == 1 else None
        for kind, part, seconds in (
            (_FORWARD, x, row.forward_seconds),
            (_BACKWARD, x, row.backward_seconds),
            (_WEIGHTS, x * _WITHOUT_ATTENTION, weight_seconds),
        ):
            if seconds is not None:
                relative = part / seconds
                squares = np.outer(relative, relative).ravel()
                sums[chunk, kind] += np.concatenate([squares, relative, [1.0]])
    return sums


def image_sums(patches: Sequence[int], forward: float, backward: float | None) -> Floats:
    """Sums of the images that a GPU encoded in a step, float64 [8], which add up as `row_sums`.

    Args:
        patches: of each image.
        forward, backward: seconds of the tower's; None: it had no backward.
    """
    n = np.array(patches, dtype=np.float64)
    x = np.array([n.sum(), (n * n).sum()]) / forward
    both = (0.0, 0.0) if backward is None else (forward, backward)
    return np.concatenate([np.outer(x, x).ravel(), x, both])


def fit_images(sums: Floats, start: CostModel) -> CostModel:
    """The model with `per_patch`, `per_patch_sq` and `tower_ratio` of least relative error; `start`
    where the sums tell nothing.

    Args:
        sums: see `image_sums`.
    """
    size = np.sqrt(sums[[0, 3]])
    if not size.all():
        return start
    prior = np.array([start.per_patch, start.per_patch_sq]) * size
    squares = sums[:4].reshape(2, 2) / np.outer(size, size)
    found = _least_squares(squares, sums[4:6] / size, prior, _PRIOR) / size
    ratio = sums[7] / sums[6] if sums[6] else start.tower_ratio
    values = dict(zip(("per_patch", "per_patch_sq"), found.tolist(), strict=True))
    return replace(start, **values, tower_ratio=float(ratio))


def slowness(rows: Sequence[ChunkSeconds], model: CostModel, layout: Layout) -> float:
    """Seconds of forwards and backwards over those that a model gives; 0 without rows."""
    weights = model.weights_for(layout)
    factors = model.factors_for(layout)
    theta = _theta(model)
    measured = predicted = 0.0
    for chunk, row in rows:
        forward = weights[chunk] * float(_features(layout, row, factors[chunk]) @ theta)
        measured += row.forward_seconds
        predicted += forward
        if row.backward_seconds is not None:
            measured += row.backward_seconds
            predicted += forward * model.backward_ratio
    return measured / predicted if rows else 0.0


def fit_sums(sums: Floats, start: CostModel, layout: Layout) -> CostModel:
    """The model of least relative error; `start` where the sums tell nothing.

    Args:
        sums: see `row_sums`; of all ranks, earlier steps faded.
        start: the model in force.
    """
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
    *rates, per_further, cp_fixed = theta.tolist()
    values: dict[str, Any] = dict(zip(_RATES, rates, strict=True))
    if size[-1] > 0 and values["per_token"] > 0:
        # The run's widths say more of it than what was assumed for each.
        values |= {"cp_overhead": per_further / values["per_token"], "cp_fixed": cp_fixed}
        values["cp_overheads"] = None
    return replace(
        start,
        **values,
        backward_ratio=ratio,
        stage_weights=tuple(weights.tolist()),
        weight_ratio=_weight_ratio(sums, theta, weights, start.weight_ratio),
        square_range=(1.0,),
        fit_error=None,
    )


def _features(layout: Layout, row: Measurement, square_factor: float) -> Floats:
    share = CostModel.share_of_rank(layout, row.width)
    tokens, tokens_sq, num_samples = (share * float(size) for size in row.sizes)
    more_ranks = row.width - 1
    return np.array(
        [1.0, tokens, square_factor * tokens_sq, num_samples, more_ranks * tokens, more_ranks > 0]
    )


def _parts(sums: Floats) -> tuple[Floats, Floats, Floats]:
    """Sums of one kind [chunks, 43] as [chunks, 6, 6], [chunks, 6] and [chunks]."""
    squares = sums[:, :_NUM_SQUARES].reshape(-1, _NUM_FEATURES, _NUM_FEATURES)
    return squares, sums[:, _NUM_SQUARES:-1], sums[:, -1]


def _quadratic(squares: Floats, theta: Floats) -> Floats:
    """theta^T S theta of each chunk: [chunks]."""
    result: Floats = np.einsum("i,cij,j->c", theta, squares, theta)
    return result


def _theta(model: CostModel) -> Floats:
    rates = (getattr(model, name) for name in _RATES)
    return np.array([*rates, model.per_token * (model.over_ranks(2)[1] - 1), model.cp_fixed])


def _least_squares(squares: Floats, products: Floats, prior: Floats, strength: float) -> Floats:
    """z >= 0 of least z^T S z - 2 p^T z + strength * |z - prior|^2 (Lawson and Hanson 1974)."""
    from scipy.optimize import nnls

    # With S = L L^T this is |L^T z - L^-1 p|^2 plus a constant.
    lower = np.linalg.cholesky(squares + strength * np.eye(prior.size))
    solution: Floats = nnls(lower.T, np.linalg.solve(lower, products + strength * prior))[0]
    return solution


def _weight_ratio(sums: Floats, theta: Floats, weights: Floats, before: float) -> float:
    """Seconds of weight gradients over those of the forward without attention."""
    squares, products, counts = _parts(sums[:, _WEIGHTS])
    curvature = float(weights**2 @ _quadratic(squares, theta))
    slope = float(weights @ (products @ theta))
    held = _PRIOR * float(counts.sum())
    return max(0.0, (slope + held * before) / (curvature + held)) if held else before
