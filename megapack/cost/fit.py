"""Fit the coefficients of a cost model to measurements, by non-negative least squares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from megapack.base.arrays import Floats
from megapack.errors import DataError
from megapack.layout import Layout

# Rows over several ranks whose tokens cost less than this share of their seconds tell no overhead:
# a noise of 2 % of the seconds would be an overhead of 100 %. Forwards with a smaller share outside
# of attention tell no ratio of weight gradients. Chosen by hand.
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
    weight_seconds: float | None = None
    """Seconds of the weight gradients, a part of the backward's; None = not measured."""

    @property
    def sizes(self) -> tuple[int, int, int]:
        """What the row holds, whatever its width."""
        return self.row_tokens, self.tokens_sq, self.num_samples


def fit_coefficients(measurements: Sequence[Measurement], layout: Layout) -> dict[str, Any]:
    """Fields of a `CostModel`, of the least squared relative errors of forward seconds.

    No coefficient is below 0: it uses scipy's solver (Lawson and Hanson 1974). If the measurements
    cannot separate two coefficients, one of them gets the sum: rows of one sample each cannot
    separate `per_sample` from `fixed`.

    Rows over several DP ranks only give `cp_overhead` and `cp_fixed`: all other coefficients, and
    the error, are those of the rows of one rank. `weight_ratio` is relative to the fitted forward
    without its part per squared token. What the measurements do not tell is left out.

    Raises:
        DataError: no measurements of rows of one rank, or a measurement with impossible sizes or
            seconds.
    """
    from scipy.optimize import nnls

    given = [Measurement(*row) for row in measurements]
    _check(given)
    rows = [row for row in given if row.width == 1]
    wide = [row for row in given if row.width > 1]
    seconds = np.array([row.forward_seconds for row in rows])
    share = 1.0 / (layout.num_chunks * layout.cp)
    columns = np.array([[1.0, *(share * float(size) for size in row.sizes)] for row in rows])
    relative = columns / seconds[:, None]
    # Scale the columns to a maximum of 1, for a well-conditioned solve: a sample of 32768 tokens
    # has 1e9 squared tokens. 1e-300 avoids dividing by 0 in a column of zeros.
    size = np.maximum(np.abs(relative).max(axis=0), 1e-300)
    coefficients: Floats = nnls(relative / size, np.ones(len(rows)))[0] / size
    error = float(np.abs(relative @ coefficients - 1).mean())
    fixed, per_token, per_token_sq, per_sample = coefficients.tolist()
    return {
        "fixed": fixed,
        "per_token": per_token,
        "per_token_sq": per_token_sq,
        "per_sample": per_sample,
        "fit_error": error,
        **_backward_ratio(rows),
        **_over_ranks(rows, wide, fixed, coefficients[1:] * share),
        **_weight_ratio(rows, columns[:, [0, 1, 3]] @ coefficients[[0, 1, 3]]),
    }


def _check(rows: Sequence[Measurement]) -> None:
    if not rows:
        raise DataError("0 measurements; give at least one")
    if all(row.width > 1 for row in rows):
        raise DataError(
            f"{len(rows)} measurements, all of rows over several DP ranks; add rows of one rank"
        )
    for number, row in enumerate(rows):
        *sizes, forward, backward, width, weight = row
        seconds = [value for value in (forward, backward, weight) if value is not None]
        if not all(0 < value < math.inf for value in seconds):
            raise DataError(f"row {number} took {seconds} seconds; give positive, finite ones")
        if not all(0 <= value < math.inf for value in sizes):
            raise DataError(f"row {number} has tokens and samples {sizes}; give 0 or more")
        if not 1 <= width < math.inf:
            raise DataError(f"row {number} lies over {width} DP ranks; give 1 or more")
        if weight is not None and (backward is None or weight > backward):
            raise DataError(
                f"row {number} has weight gradients of {weight} seconds and a backward of "
                f"{backward}; give the seconds of both, the backward's with its weight gradients"
            )


def _backward_ratio(rows: Sequence[Measurement]) -> dict[str, float]:
    """Backward over forward seconds, summed over the rows that have both."""
    both = [row for row in rows if row.backward_seconds is not None]
    if not both:
        return {}
    backward = sum(float(row.backward_seconds or 0.0) for row in both)
    return {"backward_ratio": backward / sum(row.forward_seconds for row in both)}


def _weight_ratio(rows: Sequence[Measurement], without_attention: Floats) -> dict[str, float]:
    """Seconds of weight gradients over those of forwards without attention, summed over rows.

    Args:
        without_attention: float64, fitted forward seconds of each row without squared tokens.
    """
    measured = [k for k, row in enumerate(rows) if row.weight_seconds is not None]
    forward = float(without_attention[measured].sum())
    if forward <= _LEAST_WORK * sum(rows[k].forward_seconds for k in measured):
        return {}
    seconds = sum(float(rows[k].weight_seconds or 0.0) for k in measured)
    return {"weight_ratio": seconds / forward}


def _over_ranks(
    rows: Sequence[Measurement], wide: Sequence[Measurement], fixed: float, work: Floats
) -> dict[str, Any]:
    """`cp_overhead` and `cp_fixed` that predict the seconds of rows over several DP ranks best; and
    `cp_overheads`, if more than one width was measured.

    They have the smallest sum of relative errors, which a row during which the machine paused does
    not move. A row of 1 s on one rank, with fixed seconds of 0.1, has 0.45 s of work on each of two
    ranks. If it took 0.595 s there, and all of its work is per token, the overhead is 0.1:
    (0.595 - 0.1 - 0.45) / 0.45.

    Args:
        rows, wide: rows of one DP rank, and rows over several.
        fixed: seconds of a row that do not depend on its sizes.
        work: float64 [3], seconds of one rank per row token, squared token and sample. The work of
            a row that was not measured on one rank follows from it. A measured one is better: the
            fit is wrong by as much as the overhead is large.
    """
    from scipy.optimize import linprog

    alone: dict[tuple[int, int, int], list[float]] = {}
    for row in rows:
        alone.setdefault(row.sizes, []).append(row.forward_seconds - fixed)
    more, per_overhead, widths = [], [], []
    for row in wide:
        on_one = alone.get(row.sizes)
        seconds = float(np.median(on_one)) if on_one else float(work @ np.array(row.sizes))
        of_tokens = float(work[0]) * row.row_tokens * (row.width - 1) / row.width
        if of_tokens < _LEAST_WORK * row.forward_seconds:
            continue
        more.append((row.forward_seconds - fixed - seconds / row.width) / row.forward_seconds)
        widths.append(row.width)
        per_overhead.append((of_tokens / row.forward_seconds, 1 / row.forward_seconds))
    if not more:
        return {}
    # |more - x . (overhead, fixed)| of each row is a variable that is at least both signs of it.
    # Where the rows cannot tell the two apart, fixed seconds are a little dearer.
    x, y, ones = np.array(per_overhead), np.array(more), np.eye(len(more))
    cost = np.concatenate([[0.0, 1e-3 * float(x[:, 1].mean())], np.ones(len(more))])
    found = linprog(
        cost, A_ub=np.block([[x, -ones], [-x, -ones]]), b_ub=np.concatenate([y, -y]), method="highs"
    )
    each, fixed_more = float(found.x[0]), float(found.x[1])
    fields: dict[str, Any] = {"cp_overhead": each, "cp_fixed": fixed_more}
    # A width costs what the median of its rows does; one between others that was not measured, as
    # much for each further rank as the one before.
    own = (y - fixed_more * x[:, 1]) / x[:, 0]
    by_width = {width: own[np.equal(widths, width)] for width in sorted(set(widths))}
    if len(by_width) > 1:
        overheads = []
        for level in range(1, max(widths).bit_length()):
            each = max(float(np.median(by_width.get(1 << level, each))), 0.0)
            overheads.append(each * ((1 << level) - 1))
        fields["cp_overheads"] = tuple(overheads)
    return fields
