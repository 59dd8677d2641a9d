"""The search for a step's fastest legal draft: pack, order, improve.

    1. Start    values of M and targets of their rows; items packed to them; boards simulated
    2. Improve  the best two boards, by moves
    3. Finish   the fastest one as a draft, with the order of each rank

This is done for each way in which the policy allows a step to be packed:

    whole items in rows on one DP rank each            always, unless one must be cut or widened
    parts of families as items                         with shared prefixes
    rows over several DP ranks                         under context_parallel="dynamic"
    pieces of samples and families, stages that choose
    their order, weight gradients in their waits       split_samples="auto" or backward="split"

Each way starts from the draft of the ones before it, too, and gives a draft only if that is faster.
So no freedom makes a plan slower in the simulator than whole items on one rank each. An order of a
step's own gains where rows take what the search expects, and loses more than rows and widths do
where they do not. With seconds that are not measured it has to be faster whatever the speed of
attention's kernels (`CostModel.square_range`). The search counts simulations, never time: every
rank finds the same plan.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from megapack.base.arrays import Bools
from megapack.errors import PlanError
from megapack.planner.counts import fewest_counts
from megapack.planner.cuts import is_alone
from megapack.planner.draft import Draft
from megapack.planner.families import Families, cut_families, families_in_pieces, parts_of_families
from megapack.planner.items import Items
from megapack.planner.pieces import plan_pieces
from megapack.planner.refusals import no_pieces, no_whole_rows
from megapack.planner.scored import Scored, Way, real_seconds
from megapack.planner.starts import narrow_starts
from megapack.planner.step import UNLIMITED, Step
from megapack.planner.wide import plan_wide

logger = logging.getLogger(__name__)

# All constants of this module were chosen by hand. docs/maintainers/planner.md says how to judge a
# change.

# Without a bubble a draft with more micro-batches than the fewest must be this much faster: M=11
# must take less than 0.998 s if M=10 takes 1 s.
_LEAST_GAIN = 0.002
# The best boards share the remaining evaluations.
_CONTENDERS = 2
# Of the policy's evaluations, each cut of families gets a sixteenth, and the best one half of them
# again. The draft without sharing gets all of them, as it would without prefixes; if none is made,
# the best cut gets them.
_TRIAL_PART = 16
_FINAL_PART = 2
# A draft is faster than another one if it is so by this part: rounding in fp64 never decides.
_MARGIN = 1e-9


def best_draft(items: Items) -> Draft:
    """The fastest draft that the policy allows.

    Args:
        items: colocated sets with the tokens that they share inside.

    Raises:
        PlanError: no draft respects the policy; the message says what to set.
    """
    step = items.step
    widens = step.policy.context_parallel == "dynamic" and step.layout.dp > 1
    cuts = step.cuts_samples
    # A sample over the budget is cut, or goes over several ranks, where that is allowed.
    over = _over(items)
    must_cut = cuts and bool((over & is_alone(items)).any())
    # What families share may make items of narrow rows, which wide ones then have.
    must_widen = widens and step.prefixes is None and bool(over.any())
    narrow = wide = refused = None
    try:
        if not must_widen and (widens or not must_cut):
            narrow = _plan_narrow(items)
    except PlanError as error:
        # Whole rows of one rank are over the cap on live tokens; shorter ones may not be.
        if not (widens or cuts):
            raise
        refused = error
    pieces = whole = items
    if must_cut and step.prefixes is not None:
        pieces = _with_parts(items)
    if narrow is not None:
        items = narrow.items
        pieces = pieces if must_cut else items
    if widens:
        narrow = None if _over(items).any() else narrow
        wide = plan_wide(items, narrow)
        if step.prefixes is not None:
            # Rows over several ranks may hold families whole that a rank's rows have in parts.
            coarse = cut_families(whole, Families.find(whole), math.inf)
            wide = _fastest([wide, plan_wide(coarse, narrow)])
        if wide is None and narrow is None:
            if not cuts:
                raise no_whole_rows(items)
            refused = None if must_cut else no_whole_rows(items)
    best = wide or narrow
    if cuts or (step.policy.backward == "split" and not step.forward_only):
        ways = (pieces, *families_in_pieces(pieces))
        found = _plan_orders(ways, narrow, wide)
        if cuts and best is None and not found:
            found = _plan_orders(ways, None, None, is_tight=True)
        best = _surest(step, best, found)
    if best is not None:
        return best
    if refused is not None:
        raise refused
    # Neither whole samples in rows within the budget nor pieces are possible.
    logger.warning("%s; it is alone in its row", no_pieces(items))
    narrow = _plan_narrow(items)
    return plan_pieces(narrow.items, narrow, None) or narrow


def _plan_orders(
    ways: Iterable[Items], narrow: Draft | None, wide: Draft | None, *, is_tight: bool = False
) -> list[Draft]:
    """The best drafts with orders of their own, of each speed that attention's kernels may have."""
    found = []
    for items in ways:
        for step in _speeds(items.step):
            drafts = (draft and draft.under(step) for draft in (narrow, wide))
            found.append(plan_pieces(items.under(step), *drafts, is_tight=is_tight))
    return [draft for draft in found if draft is not None]


def _speeds(step: Step) -> Iterator[Step]:
    """The step by each speed that attention's kernels may have, which share the evaluations."""
    costs = step.cost.every_speed()
    policy = replace(step.policy, search=step.policy.search // len(costs))
    for cost in costs:
        yield step if cost is step.cost else replace(step, cost=cost, policy=policy)


def _surest(step: Step, best: Draft | None, found: Iterable[Draft]) -> Draft | None:
    """The fastest in the mean of those drafts that are faster than the best without an order of
    its own, whatever the speed of attention's kernels."""
    drafts = [draft.under(step) for draft in (best, *found) if draft is not None]
    if len(drafts) < 2 or len(step.cost.square_range) == 1:
        return _fastest(drafts)
    # float64 [drafts, speeds]
    seconds = np.array([[draft.under(at).seconds() for draft in drafts] for at in _speeds(step)]).T
    ratios = seconds / (seconds.min(axis=0) if best is None else seconds[0])
    sure = np.log(ratios).mean(axis=1)
    if best is not None:
        sure[(ratios > 1).any(axis=1)] = 0.0
    return drafts[int(np.argmin(sure))]


def _fastest(drafts: Iterable[Draft | None]) -> Draft | None:
    """The fastest draft, the first of several as fast."""
    made = [draft for draft in drafts if draft is not None]
    best = next(iter(made), None)
    for draft in made[1:]:
        if best is not None and draft.seconds() < best.seconds() * (1 - _MARGIN):
            best = draft
    return best


def _over(items: Items) -> Bools:
    """bool [I]: items over the budget of a row of one DP rank."""
    budget = items.step.budget
    return items.aligned > (UNLIMITED if budget is None else budget)


def _with_parts(items: Items) -> Items:
    """The items, those within the budget as parts of families: the parts that are best for a step
    of these items alone."""
    over = _over(items)
    within = items.take(np.flatnonzero(~over))
    if not within.num_items:
        return items
    try:
        parts = _plan_narrow(within).items
    except PlanError:
        parts = within
    return parts.joined(items.take(np.flatnonzero(over)))


def _plan_narrow(items: Items) -> Draft:
    """The best draft of rows on one DP rank each; its items may be parts of families.

    With prefixes, families are cut into parts in several ways, each planned with few evaluations,
    and the best one again with many. It is compared with the draft without sharing, whose rows save
    by chance: so prefixes never make a plan slower. If the best cut is below what any draft without
    sharing takes, that one is not made.

    Raises:
        PlanError: no draft respects the cap on live tokens.
    """
    search = items.step.policy.search
    if items.step.prefixes is None:
        return plan_rows(items, search)
    loose = items.loose()
    families = Families.find(items)
    bound = least_seconds(loose) * (1 - _MARGIN)
    best: tuple[float, Draft] | None = None
    # Items that share nothing are the loose ones.
    shares = bool(families.items.size or items.shared.any())
    for parts in parts_of_families(items, families) if shares else ():
        # No draft of these parts can be faster.
        if best is None or least_seconds(parts) < best[0]:
            best = _faster(best, parts, search // _TRIAL_PART)
    if best is None:
        return plan_rows(loose, search)
    again = search if best[0] < bound else search // _FINAL_PART
    if again > search // _TRIAL_PART:
        best = _faster(best, best[1].items, again)
    # Colocated sets that share are smaller than the same sets without sharing, so fewer rows may
    # have been enough to keep the step's rollouts.
    allowed = items.step.policy.unreachable == "pad" or loose.num_items >= fewest_counts(loose)
    if best is not None and best[0] >= bound and allowed:
        best = _faster(best, loose, search)
    assert best is not None
    return best[1]


def _faster(
    best: tuple[float, Draft] | None, items: Items, evaluations: int
) -> tuple[float, Draft] | None:
    """The faster one of a draft and the best draft of items, with its seconds."""
    try:
        draft = plan_rows(items, evaluations)
    except PlanError:
        return best
    seconds = real_seconds(draft)
    return (seconds, draft) if best is None or seconds < best[0] else best


def least_seconds(items: Items) -> float:
    """Seconds that no draft can undercut, unless its rows share more than its items do.

    Either the mean of the ranks' work on the busiest stage, with the fewest rows that hold the
    tokens, or the longest item on its way through all chunks and back.
    """
    step = items.step
    cost = step.cost
    dp = step.layout.dp
    busiest, chunks = cost.least_weights(step.layout)
    seconds = cost.share_of_rank(step.layout) * items.work
    held = int(np.minimum(items.aligned, step.capacity).sum())
    num_rows = max(dp, -(-held // step.capacity))
    mean = (cost.fixed * num_rows + math.fsum(seconds.tolist())) / dp
    passes = 1.0 if step.forward_only else 1.0 + cost.backward_ratio
    longest = (cost.fixed + float(seconds.max())) * chunks * passes
    return max(busiest * passes * mean, longest)


def plan_rows(items: Items, evaluations: int) -> Draft:
    """The best draft of whole items in rows on one DP rank each, by so many evaluations: an
    evaluation simulates one rank. With 0, the first board is taken.

    Raises:
        PlanError: no draft respects the cap on live tokens.
    """
    way = Way(items)
    found = []
    for scored, spent in narrow_starts(way, evaluations):
        found.append(scored)
        evaluations -= spent
        if evaluations < 2 * way.layout.dp and min(s.seconds for s in found) < math.inf:
            break
    fewest = min(scored.count for scored in found)
    has_bubble = way.layout.pp > 1

    def seconds(scored: Scored) -> float:
        more = scored.count > fewest and not has_bubble
        return scored.seconds * (1 + _LEAST_GAIN if more else 1.0)

    found = sorted(found, key=seconds)[:_CONTENDERS]
    if found[0].seconds == math.inf:
        raise no_whole_rows(items)
    for scored in found:
        scored.improve(evaluations // _CONTENDERS)
    return min(found, key=seconds).draft()
