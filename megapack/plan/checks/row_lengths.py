"""Invariant 12: few row lengths."""

from __future__ import annotations

from megapack.plan.checks.reading import Reading, broken


def check_row_lengths(read: Reading) -> None:
    """Raise PlanError if the plan has other row lengths than its policy allows, or a row another
    length than these."""
    policy, layout = read.plan.policy, read.plan.layout
    found, most = read.plan.row_lengths, policy.row_shapes or 0
    unit = layout.rounding(policy.round_row_tokens).row_alignment
    are_lengths = all(length > 0 and length * layout.cp % unit == 0 for length in found)
    ascend = [*found] == sorted({*found})
    if len(found) > most or bool(found) != bool(most) or not (ascend and are_lengths):
        raise broken(12, f"row lengths {list(found)} under row_shapes={most or None}")
    for where, *_, mb in read.rows:
        if found and mb.row_tokens not in {n * layout.cp * mb.width for n in found}:
            raise broken(12, f"{where}: {mb.row_tokens} tokens, not one of {list(found)} per GPU")
