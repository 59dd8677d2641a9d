"""The search for a step's fastest draft if samples share prefixes.

    items without sharing    -> the loose draft: the one without prefixes, whose rows save by chance
    families cut into parts  -> a draft per cut, with few evaluations; the best cut again, with many

The faster one is the plan. So prefixes never make a plan slower: rows of the loose draft are at
most as long as they were. If the best cut is below what any draft without sharing takes, the loose
draft is not made.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from megapack.errors import PlanError
from megapack.planner.counts import fewest_counts
from megapack.planner.draft import Draft
from megapack.planner.families import Families, parts_of_families
from megapack.planner.items import Items
from megapack.planner.scored import real_seconds
from megapack.planner.search import plan_rows

# Evaluations of the policy's: of 2,048, each cut gets 128, and the best one 1,024 again. The loose
# draft gets all 2,048, as it would without prefixes; if none is made, the best cut gets them. So 7
# cuts take less than twice the policy's evaluations: 896 + 1,024 + 2,048. Chosen by hand.
_TRIAL_PART = 16
_FINAL_PART = 2
# A draft is below the bound if it is this much faster, so that rounding in fp64 never decides.
_MARGIN = 1e-9


class _Timed(NamedTuple):
    draft: Draft
    seconds: float


def plan_shared_rows(items: Items) -> Draft:
    """The best draft that is found; its items may be parts of families.

    Args:
        items: colocated sets with the tokens that they share inside.

    Raises:
        PlanError: no draft respects the cap on live tokens.
    """
    search = items.step.policy.search
    loose = items.loose()
    families = Families.find(items)
    if not families.items.size and not items.shared.any():
        return plan_rows(loose, search)
    bound = least_seconds(loose) * (1 - _MARGIN)
    best = _best_cut(items, families, search // _TRIAL_PART)
    if best is None:
        return plan_rows(loose, search)
    is_faster = best.seconds < bound
    again = search if is_faster else search // _FINAL_PART
    if again > search // _TRIAL_PART:
        other = _timed(best.draft.items, again)
        best = other if other is not None and other.seconds < best.seconds else best
    if best.seconds >= bound and _is_allowed(loose):
        other = _timed(loose, search)
        if other is not None and other.seconds <= best.seconds:
            best = other
    return best.draft


def _best_cut(items: Items, families: Families, evaluations: int) -> _Timed | None:
    """The fastest of the cuts, each planned with few evaluations; None if no cut has a legal draft.

    A cut is not planned if no draft of its parts can be faster than the best one so far.
    """
    best = None
    for parts in parts_of_families(items, families):
        if best is not None and least_seconds(parts) >= best.seconds:
            continue
        found = _timed(parts, evaluations)
        if found is not None and (best is None or found.seconds < best.seconds):
            best = found
    return best


def _timed(items: Items, evaluations: int) -> _Timed | None:
    """The best draft of items; None if no draft respects the cap on live tokens."""
    try:
        draft = plan_rows(items, evaluations)
    except PlanError:
        return None
    return _Timed(draft, real_seconds(draft))


def _is_allowed(loose: Items) -> bool:
    """Whether the loose draft needs no padding micro-batch, or may have some.

    Colocated sets that share are smaller than the same sets without sharing, so fewer rows may have
    been enough to keep the step's rollouts.
    """
    return loose.step.policy.unreachable == "pad" or loose.num_items >= fewest_counts(loose)


def least_seconds(items: Items) -> float:
    """Seconds that no draft can undercut, unless its rows share more than its items do.

    Either the mean of the ranks' work on the busiest stage, with the fewest rows that hold the
    tokens, or the longest item on its way through all chunks and back.
    """
    step = items.step
    cost = step.real_cost
    dp = step.layout.dp
    busiest, chunks = cost.least_weights(step.layout)
    seconds = cost.share_of_rank(step.layout) * items.work_by(cost)
    held = int(np.minimum(items.aligned, step.capacity).sum())
    num_rows = max(dp, -(-held // step.capacity))
    mean = (cost.fixed * num_rows + math.fsum(seconds.tolist())) / dp
    passes = 1.0 if step.forward_only else 1.0 + cost.backward_ratio
    longest = (cost.fixed + float(seconds.max())) * chunks * passes
    return max(busiest * passes * mean, longest)
