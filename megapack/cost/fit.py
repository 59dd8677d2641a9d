"""A cost model from measurements: non-negative least squares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megapack.base.arrays import Floats
from megapack.errors import DataError
from megapack.layout import Layout


class Measurement(NamedTuple):
    """Seconds that one chunk took for one micro-batch."""

    row_tokens: int
    """Tokens of the row per DP rank (before CP)."""
    tokens_sq: int
    """Sum of squared aligned lengths."""
    num_samples: int
    forward_seconds: float
    backward_seconds: float | None = None
    """None: not measured."""


class Coefficients(NamedTuple):
    """What a fit found; fields of `CostModel`."""

    fixed: float
    per_token: float
    per_token_sq: float
    per_sample: float
    backward_ratio: float
    relative_error: float
    """Mean of |predicted - measured| / measured over the forward seconds."""


def fit_coefficients(measurements: Sequence[Measurement], layout: Layout) -> Coefficients:
    """Least squares of the relative error, no coefficient below 0.

    Lawson and Hanson 1974, by scipy. Coefficients that the measurements cannot tell apart (rows of
    one sample each tell nothing of `per_sample` beside `fixed`) come out as one of them.

    Raises:
        DataError: no measurements, or one of sizes or seconds that cannot be.
    """
    from scipy.optimize import nnls

    rows = [Measurement(*row) for row in measurements]
    _check(rows)
    seconds = np.array([row.forward_seconds for row in rows])
    share = 1.0 / (layout.num_chunks * layout.cp)
    columns = np.array(
        [[1.0, *(share * float(x) for x in row[:3])] for row in rows], dtype=np.float64
    )
    relative = columns / seconds[:, None]
    # Columns of like size: squared tokens are 1e9 times samples.
    size = np.maximum(np.abs(relative).max(axis=0), 1e-300)
    found: Floats = nnls(relative / size, np.ones(len(rows)))[0] / size
    error = float(np.abs(relative @ found - 1).mean())
    fixed, per_token, per_token_sq, per_sample = found.tolist()
    ratio = _backward_ratio(rows)
    return Coefficients(fixed, per_token, per_token_sq, per_sample, ratio, error)


def _check(rows: Sequence[Measurement]) -> None:
    if not rows:
        raise DataError("0 measurements; give at least one")
    for number, row in enumerate(rows):
        *sizes, forward, backward = row
        seconds = [forward] if backward is None else [forward, backward]
        if not all(0 < value < math.inf for value in seconds):
            raise DataError(f"row {number} took {seconds} seconds; give positive, finite ones")
        if not all(0 <= value < math.inf for value in sizes):
            raise DataError(f"row {number} has tokens and samples {sizes}; give 0 or more")


def _backward_ratio(rows: Sequence[Measurement]) -> float:
    """Backward over forward seconds of the rows that have both; 2 where none has."""
    both = [row for row in rows if row.backward_seconds is not None]
    if not both:
        return 2.0
    backward = sum(float(row.backward_seconds or 0.0) for row in both)
    return backward / sum(row.forward_seconds for row in both)
