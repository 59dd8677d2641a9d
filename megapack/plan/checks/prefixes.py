"""Invariant 8: the prefixes fit the lengths. What rows save by them is checked with the rows."""

from __future__ import annotations

from megapack.errors import DataError
from megapack.plan.checks.reading import Reading, broken


def check_prefixes(read: Reading) -> None:
    """Raise PlanError if the plan has prefixes that it must not have, or that do not fit."""
    prefixes = read.plan.prefixes
    if prefixes is None:
        return
    if read.plan.policy.share_prefixes == "off":
        raise broken(8, f"prefixes of {len(prefixes.order)} samples under share_prefixes='off'")
    try:
        prefixes.check(read.lengths)
    except DataError as error:
        raise broken(8, str(error)) from None
