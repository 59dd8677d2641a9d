"""The fastest of the ways in which a step may be packed.

    rows on one DP rank each, in Megatron's order    always, unless a sample must be cut or widened
    rows over several DP ranks                       under context_parallel="dynamic"
    pieces of samples, weight gradients in waits,    under split_samples="auto" or backward="split",
    forwards ahead                                   in both of these
    pieces of families                               under split_samples="auto" with shared prefixes

Each way gives a draft only if that is faster than the first one, so no freedom makes a plan slower
in the simulator than whole samples on one rank each.
"""

from __future__ import annotations

import logging

import numpy as np

from megapack.base.arrays import Bools
from megapack.errors import PlanError
from megapack.planner.draft import Draft
from megapack.planner.families import families_in_pieces
from megapack.planner.items import Items
from megapack.planner.operations import plan_operations
from megapack.planner.pieces import is_alone
from megapack.planner.search import plan_rows
from megapack.planner.sharing import plan_shared_rows
from megapack.planner.step import UNLIMITED
from megapack.planner.wide import plan_wide_rows

logger = logging.getLogger(__name__)


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
        logger.info("%s; trying rows over several ranks, or pieces of samples", error)
        refused = error
    pieces = items
    if must_cut and step.prefixes is not None:
        pieces = _with_parts(items)
    if narrow is not None:
        items = narrow.items
        pieces = pieces if must_cut else items
    if widens:
        narrow = None if _over(items).any() else narrow
        try:
            wide = plan_wide_rows(items, narrow)
        except PlanError as error:
            if not cuts:
                raise
            logger.info("%s; trying pieces of samples", error)
            refused = None if must_cut else error
    best = wide or narrow
    if cuts or (step.policy.backward == "split" and not step.forward_only):
        ways = (pieces, *families_in_pieces(pieces))
        drafts = [plan_operations(own, narrow, wide) for own in ways]
        if cuts and best is None and not any(drafts):
            drafts = [plan_operations(own, None, None, is_tight=True) for own in ways]
        made = [found for found in drafts if found is not None]
        if made and (len(made) > 1 or wide is not None):
            made = sorted(made if wide is None else [wide, *made], key=Draft.seconds)
        best = made[0] if made else best
    if best is None:
        return _plan_uncut(items, refused)
    return best


def _over(items: Items) -> Bools:
    """bool [I]: items over the budget of a row of one DP rank."""
    budget = items.step.budget
    return items.aligned > (UNLIMITED if budget is None else budget)


def _plan_narrow(items: Items) -> Draft:
    """The best draft of rows on one DP rank each."""
    if items.step.prefixes is None:
        return plan_rows(items, items.step.policy.search)
    return plan_shared_rows(items)


def _with_parts(items: Items) -> Items:
    """The items, those within the budget as parts of families: the parts that are best for a step
    of these items alone."""
    over = _over(items)
    within = items.take(np.flatnonzero(~over))
    if not within.num_items:
        return items
    try:
        parts = plan_shared_rows(within).items
    except PlanError:
        parts = within
    return parts.joined(items.take(np.flatnonzero(over)))


def _plan_uncut(items: Items, refused: PlanError | None) -> Draft:
    """The draft if neither whole samples in rows within the budget nor pieces are possible: under
    oversize="alone" with samples over the budget alone in their rows.

    Raises:
        PlanError: `refused`, or what keeps samples over the budget from being cut.
    """
    if refused is not None:
        raise refused
    step = items.step
    item = int(np.where(items.item_samples == 1, items.aligned, 0).argmax())
    sample = int(items.samples[items.first_samples[item]])
    tokens = int(items.aligned[item])
    on_gpu = -(-tokens // step.layout.cp)
    most = "M" if step.layout.vpp == 1 else f"G={step.layout.group_size}"
    cap = step.policy.max_live_tokens_per_gpu
    what = (
        f"step {step.number}: sample {sample} has {tokens} padded tokens, over the budget of "
        f"{step.budget} per row, and no order of its pieces was found that holds them: a chain has "
        f"at most {most} pieces, which are live at once, {on_gpu} tokens per GPU on each of "
        f"pp={step.layout.pp} stages (max_live_tokens_per_gpu={cap})"
    )
    widens = step.policy.context_parallel == "dynamic"
    has_shapes = step.policy.row_shapes is not None
    if step.policy.oversize == "error" or widens or has_shapes:
        alone = "oversize='alone'" + (" and context_parallel='fixed'" if widens else "")
        alone += " and row_shapes=None" if has_shapes else ""
        raise PlanError(
            f"{what}; set max_live_tokens_per_gpu to {2 * on_gpu} or more, raise "
            f"max_tokens_per_gpu, or set {alone}"
        )
    logger.warning("%s; it is alone in its row", what)
    narrow = _plan_narrow(items)
    return plan_operations(narrow.items, narrow, None) or narrow
