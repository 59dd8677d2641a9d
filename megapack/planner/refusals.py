"""What the planner refuses before it searches, or after it has found nothing: one line each."""

from __future__ import annotations

import logging

import numpy as np

from megapack.cost.model import CostModel
from megapack.errors import ConfigError, PlanError
from megapack.layout import Layout, round_up
from megapack.planner.batch import Batch
from megapack.planner.items import Items
from megapack.planner.step import Step

# Limit on the seconds of a whole batch as one row. Sums over many rows then stay finite: 2**60 rows
# of 1e200 s are 1.2e218 s, and fp64 ends at 1.8e308.
_MAX_SECONDS = 1e200

logger = logging.getLogger(__name__)


def check_cost(batch: Batch, layout: Layout, cost: CostModel) -> None:
    """Raise ConfigError if sums of seconds could overflow; the search compares such sums."""
    cost.weights_for(layout)
    cost.factors_for(layout)
    tokens = int(layout.aligned_sample_tokens(batch.lengths).sum())
    num_samples = batch.lengths.size
    seconds = cost.forward_seconds(
        layout, row_tokens=tokens, tokens_sq=tokens**2, num_samples=num_samples
    )
    seconds = (seconds + cost.fixed * num_samples) * (1 + cost.backward_ratio) + cost.p2p
    if not seconds < _MAX_SECONDS:
        raise ConfigError(
            f"the cost model gives {seconds:.3g} seconds for {num_samples} samples of {tokens} "
            "tokens; set coefficients in seconds"
        )


def check_set_sizes(batch: Batch, micro_batch_size: int | None) -> None:
    """Raise ConfigError if a colocated set has more samples than a micro-batch may have."""
    if micro_batch_size is None or batch.colocate_ids is None:
        return
    sizes = np.bincount(batch.item_of)
    if int(sizes.max()) > micro_batch_size:
        samples = np.flatnonzero(batch.item_of == sizes.argmax()).tolist()
        raise ConfigError(
            f"{len(samples)} samples share the colocate id {batch.colocate_ids[samples[0]]!r} "
            f"(the first is sample {samples[0]}), micro_batch_size={micro_batch_size}; set it to "
            f"{len(samples)} or more"
        )


def check_oversize(batch: Batch, step: Step) -> None:
    """Raise PlanError for items over the budget, or log them if they may be planned.

    Under oversize="alone" such an item may have a row of its own. Under context_parallel="dynamic"
    it goes over several DP ranks, whatever `oversize` says, and must fit on some number of them.
    """
    layout, policy, budget = step.layout, step.policy, step.budget
    if budget is None:
        return
    tokens = batch.item_tokens(layout, step.prefixes, 1)
    over = np.flatnonzero(tokens > budget)
    if policy.split_samples == "auto":
        # Single samples are cut into pieces.
        over = over[np.bincount(batch.item_of)[over] > 1]
    if not over.size:
        return
    # The least budget of a row of one DP rank with which some width holds each item. At cp=1, 100
    # tokens over four ranks are padded to 104, of which each rank holds 26.
    least = tokens
    for width in policy.widths(layout)[1:]:
        own = batch.item_tokens(layout, step.prefixes, width)
        least = np.minimum(least, -(-layout.over(width).aligned_row_tokens(own) // width))
    least = np.asarray(round_up(least, layout.row_alignment), dtype=np.int64)
    over = over[least[over] > budget]
    if not over.size:
        # Each goes over as many DP ranks as hold it.
        return
    samples = np.flatnonzero(batch.item_of == over[0]).tolist()
    held = int(layout.aligned_row_tokens(int(tokens[over[0]])))
    name, kind = f"sample {samples[0]}", "sample(s)"
    if batch.colocate_ids is not None:
        name = f"samples {samples} of colocate id {batch.colocate_ids[samples[0]]!r}"
        kind = "colocated set(s)"
    what = (
        f"{over.size} {kind} over the budget of {budget} padded tokens per row (max_tokens_per_gpu "
        f"* cp={layout.cp}, rounded down to {layout.row_alignment}); the first is {name}: "
        f"{sum(batch.lengths[samples].tolist())} tokens, {held} padded"
    )
    if policy.context_parallel == "dynamic":
        wanted = -(-int(least[over].max()) // layout.cp)
        raise PlanError(
            f"{what}, which no aligned block of up to {policy.widths(layout)[-1]} of "
            f"dp={layout.dp} ranks holds (context_parallel='dynamic'); set max_tokens_per_gpu to "
            f"{wanted} or more"
        )
    if policy.row_shapes is not None:
        raise PlanError(f"{what}; raise max_tokens_per_gpu or set row_shapes=None")
    if policy.oversize == "error":
        raise PlanError(f"{what}; raise max_tokens_per_gpu or set oversize='alone'")
    logger.warning("%s; each is alone in its row", what)


def no_whole_rows(items: Items) -> PlanError:
    """No rows of whole samples respect the policy."""
    step, layout, policy = items.step, items.step.layout, items.step.policy
    cap = policy.max_live_tokens_per_gpu
    reason = f"stays within max_live_tokens_per_gpu={cap}"
    setting = "raise it or set a larger cp"
    if cap is None:
        reason = f"fills all micro-batches (unreachable={policy.unreachable!r})"
        setting = "raise max_tokens_per_gpu"
        if policy.unreachable != "pad":
            setting += " or set unreachable='pad'"
    return PlanError(
        f"step {step.number}: no plan found {reason} with samples of up to "
        f"{int(items.aligned.max())} padded tokens on dp={layout.dp}, pp={layout.pp}, "
        f"vpp={layout.vpp}, cp={layout.cp} and context_parallel={policy.context_parallel!r}; "
        f"{setting}"
    )


def no_pieces(items: Items) -> str:
    """Which sample is over the budget, where neither rows hold it nor its pieces.

    Raises:
        PlanError: it may not be alone in a row.
    """
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
    return what
