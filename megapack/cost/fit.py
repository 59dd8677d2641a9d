"""Fit the coefficients of a cost model to measurements, by non-negative least squares."""

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
    """Samples of the row."""
    forward_seconds: float
    """Seconds of the chunk's forward."""
    backward_seconds: float | None = None
    """Seconds of the chunk's backward; None = not measured."""


class Coefficients(NamedTuple):
    """The result of a fit, named as the fields of `CostModel`."""

    fixed: float
    per_token: float
    per_token_sq: float
    per_sample: float
    backward_ratio: float
    relative_error: float
    """Mean of |predicted - measured| / measured over the forward seconds."""


def fit_coefficients(measurements: Sequence[Measurement], layout: Layout) -> Coefficients:
    """Minimise the squared relative errors of the forward seconds, with no coefficient below 0.

    Uses scipy's solver (Lawson and Hanson 1974). If the measurements cannot separate two
    coefficients, one of them gets the sum: rows of one sample each cannot separate `per_sample`
    from `fixed`.

    Raises:
        DataError: no measurements, or a measurement with impossible sizes or seconds.
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
    # Scale the columns to a maximum of 1, for a well-conditioned solve: a sample of 32768 tokens
    # has 1e9 squared tokens. 1e-300 avoids dividing by 0 in a column of zeros.
    size = np.maximum(np.abs(relative).max(axis=0), 1e-300)
    coefficients: Floats = nnls(relative / size, np.ones(len(rows)))[0] / size
    error = float(np.abs(relative @ coefficients - 1).mean())
    fixed, per_token, per_token_sq, per_sample = coefficients.tolist()
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
    """Backward over forward seconds, summed over the rows that have both; 2 if no row has."""
    both = [row for row in rows if row.backward_seconds is not None]
    if not both:
        return 2.0
    backward = sum(float(row.backward_seconds or 0.0) for row in both)
    return backward / sum(row.forward_seconds for row in both)
