"""Invariant 12: few row shapes."""

from __future__ import annotations

from megapack.errors import PlanError
from megapack.plan.checks.reading import Reading, broken


def check_shapes(read: Reading) -> None:
    """Raise PlanError if rows have other shapes than the plan says."""
    shapes, most = read.plan.row_shapes, read.plan.policy.row_shapes
    if shapes is None and most is None:
        return
    if shapes is None or most is None or len(shapes.shapes) > most:
        raise broken(12, f"row shapes {shapes and shapes.tokens} under row_shapes={most}")
    try:
        needed = read.plan.holding_shapes(shapes, read.lengths)
    except PlanError as error:
        raise broken(12, str(error)) from None
    if needed != shapes:
        raise broken(12, f"rows need the shapes {needed.shapes}, the plan has {shapes.shapes}")
