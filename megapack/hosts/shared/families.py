"""Families of a host's samples, for planners that get lengths alone: which belong in one row.

With `share_prefixes` of `megapack.schedule.PlannedSchedule`, a row runs what its own samples have
in common once. So samples with a common beginning, such as the answers to one prompt, are packed as
one item where the budget allows it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from megapack.layout import Layout
from megapack.prefixes import SharedPrefixes, worthwhile


def callers_tokens(lengths: Sequence[int]) -> Sequence[Any] | None:
    """The token ids of the samples that a host's planner is called for; None if they are not found.

    slime and miles give their planner lengths, out of a function that has the ids:
    `data["tokens"]`. Its local variable is read, because slime's is a method of a Ray actor, whose
    class cannot be patched.

    Args:
        lengths: those that the planner got; ids of other lengths are not taken.
    """
    data = sys._getframe(2).f_locals.get("data")
    tokens = data.get("tokens") if isinstance(data, dict) else None
    if tokens is None or [len(ids) for ids in tokens] != list(lengths):
        return None
    return tokens  # type: ignore[no-any-return]


def family_parts(
    token_ids: Sequence[Any], step_of: Sequence[int], layout: Layout, max_tokens: int
) -> list[int] | None:
    """A number per sample, equal for those that belong in one row; None if none share anything.

    A family is cut into parts of nearly equal size that a row can hold, in the order of its tree.

    Args:
        step_of: the step of each sample; samples of different steps do not share.
        max_tokens: padded tokens of a row, each copy of a prefix counted.

    >>> family_parts([[5, 6, 7, 8], [1, 2], [5, 6, 7, 9]], [0, 0, 0], Layout(), 8)
    [0, 1, 0]
    """
    aligned = layout.aligned_sample_tokens(np.array([len(ids) for ids in token_ids]))
    prefixes = worthwhile(SharedPrefixes.from_samples(token_ids), aligned, layout)
    if not prefixes.order:
        return None
    families: dict[tuple[int, int], list[int]] = {}
    tree = -1
    for sample, common in zip(prefixes.order, prefixes.common, strict=True):
        tree += common == 0
        families.setdefault((step_of[sample], tree), []).append(sample)
    part_of = list(range(len(token_ids)))
    for members in families.values():
        total = int(aligned[members].sum())
        even = total / -(-total // max_tokens)
        first, held = members[0], 0
        for sample in members:
            tokens = int(aligned[sample])
            if held + tokens > max_tokens or held + tokens / 2 > even:
                first, held = sample, 0
            part_of[sample] = first
            held += tokens
    return part_of
