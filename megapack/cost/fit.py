"""Fit the coefficients of a cost model to measurements, by non-negative least squares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megapack.base.arrays import Floats
from megapack.errors import DataError
from megapack.layout import Layout

# Rows over several ranks with less work than this share of their seconds tell no overhead: a noise
# of 2 % of the seconds would be an overhead of 100 %. Chosen by hand.
_LEAST_WORK = 0.02


class Measurement(NamedTuple):
    """Seconds that one chunk took for one micro-batch."""

    row_tokens: int
    """Tokens of the whole row (before CP)."""
    tokens_sq: int
    """Sum of squared aligned lengths."""
    num_samples: int
    """Samples of the row."""
    forward_seconds: float
    """Seconds of the chunk's forward."""
    backward_seconds: float | None = None
    """Seconds of the chunk's backward; None = not measured."""
    width: int = 1
    """DP ranks that shared the row."""

    @property
    def sizes(self) -> tuple[int, int, int]:
        """What the row holds, whatever its width."""
        return self.row_tokens, self.tokens_sq, self.num_samples


class Coefficients(NamedTuple):
    """The result of a fit, named as the fields of `CostModel`."""

    fixed: float
    per_token: float
    per_token_sq: float
    per_sample: float
    backward_ratio: float
    cp_overhead: float | None
    """None: no row over several DP ranks tells it."""
    relative_error: float
    """Mean of |predicted - measured| / measured over the forward seconds of rows of one DP rank."""


def fit_coefficients(measurements: Sequence[Measurement], layout: Layout) -> Coefficients:
    """Minimise the squared relative errors of the forward seconds, with no coefficient below 0.

    Uses scipy's solver (Lawson and Hanson 1974). If the measurements cannot separate two
    coefficients, one of them gets the sum: rows of one sample each cannot separate `per_sample`
    from `fixed`.

    Rows over several DP ranks only give `cp_overhead`: all other coefficients, and the error, are
    those of the rows of one rank.

    Raises:
        DataError: no measurements of rows of one rank, or a measurement with impossible sizes or
            seconds.
    """
    from scipy.optimize import nnls

    given = [Measurement(*row) for row in measurements]
    _check(given)
    rows = [row for row in given if row.width == 1]
    seconds = np.array([row.forward_seconds for row in rows])
    share = 1.0 / (layout.num_chunks * layout.cp)
    columns = np.array(
        [[1.0, *(share * float(x) for x in row.sizes)] for row in rows], dtype=np.float64
    )
    relative = columns / seconds[:, None]
    # Scale the columns to a maximum of 1, for a well-conditioned solve: a sample of 32768 tokens
    # has 1e9 squared tokens. 1e-300 avoids dividing by 0 in a column of zeros.
    size = np.maximum(np.abs(relative).max(axis=0), 1e-300)
    coefficients: Floats = nnls(relative / size, np.ones(len(rows)))[0] / size
    error = float(np.abs(relative @ coefficients - 1).mean())
    fixed, per_token, per_token_sq, per_sample = coefficients.tolist()
    return Coefficients(
        fixed,
        per_token,
        per_token_sq,
        per_sample,
        _backward_ratio(rows),
        _cp_overhead(given, fixed, coefficients[1:] * share),
        error,
    )


def _check(rows: Sequence[Measurement]) -> None:
    if not rows:
        raise DataError("0 measurements; give at least one")
    if all(row.width > 1 for row in rows):
        raise DataError(
            f"{len(rows)} measurements, all of rows over several DP ranks; add rows of one rank"
        )
    for number, row in enumerate(rows):
        *sizes, forward, backward, width = row
        seconds = [forward] if backward is None else [forward, backward]
        if not all(0 < value < math.inf for value in seconds):
            raise DataError(f"row {number} took {seconds} seconds; give positive, finite ones")
        if not all(0 <= value < math.inf for value in sizes):
            raise DataError(f"row {number} has tokens and samples {sizes}; give 0 or more")
        if not 1 <= width < math.inf:
            raise DataError(f"row {number} lies over {width} DP ranks; give 1 or more")


def _backward_ratio(rows: Sequence[Measurement]) -> float:
    """Backward over forward seconds, summed over the rows that have both; 2 if no row has."""
    both = [row for row in rows if row.backward_seconds is not None]
    if not both:
        return 2.0
    backward = sum(float(row.backward_seconds or 0.0) for row in both)
    return backward / sum(row.forward_seconds for row in both)


def _cp_overhead(rows: Sequence[Measurement], fixed: float, work: Floats) -> float | None:
    """The overhead that predicts the seconds of rows over several DP ranks best.

    It has the smallest sum of relative errors, which in one dimension is a weighted median: a row
    during which the machine paused does not move it. A row of 1 s on one rank, with fixed seconds
    of 0.1, has 0.45 s of work on each of two ranks. If it took 0.595 s there, the overhead is 0.1:
    (0.595 - 0.1) / 0.45 - 1.

    Args:
        fixed: seconds of a row that do not depend on its sizes.
        work: float64 [3], seconds of one rank per row token, squared token and sample. The work of
            a row that was not measured on one rank follows from it. A measured one is better: the
            fit is wrong by as much as the overhead is large.
    """
    alone: dict[tuple[int, int, int], list[float]] = {}
    for row in rows:
        if row.width == 1:
            alone.setdefault(row.sizes, []).append(row.forward_seconds - fixed)
    overheads = []
    weights = []
    for row in rows:
        if row.width == 1:
            continue
        on_one = alone.get(row.sizes)
        seconds = float(np.median(on_one)) if on_one else float(work @ np.array(row.sizes))
        seconds /= row.width
        if seconds < _LEAST_WORK * row.forward_seconds:
            continue
        overheads.append((row.forward_seconds - fixed) / seconds - 1)
        weights.append(seconds / row.forward_seconds)
    if not overheads:
        return None
    order = np.argsort(overheads)
    below = np.cumsum(np.array(weights)[order])
    middle = int(np.searchsorted(below, below[-1] / 2))
    return max(0.0, overheads[int(order[middle])])
