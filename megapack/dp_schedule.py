"""`build_dp_schedule`: sample lengths -> `Plan`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from megapack.base.arrays import Ids, Ints, read_budget, read_lengths, read_sets
from megapack.cost.model import CostModel
from megapack.errors import ConfigError, PlanError, brief
from megapack.layout import Layout, round_up
from megapack.plan.plan import Plan, RolloutId, StepPlan
from megapack.planner.choose import best_draft
from megapack.planner.counts import keep_reachable, split_rollouts
from megapack.planner.explain import explain
from megapack.planner.items import Items
from megapack.planner.step import Step
from megapack.policy import Policy, check_policy
from megapack.prefixes import PrefixTable, SharedPrefixes, worthwhile

# Limit on the seconds of a whole batch as one row. Sums over many rows then stay finite: 2**60 rows
# of 1e200 s are 1.2e218 s, and fp64 ends at 1.8e308.
_MAX_SECONDS = 1e200

logger = logging.getLogger(__name__)


def build_dp_schedule(
    lengths: Sequence[int] | Ints,
    *,
    layout: Layout,
    max_tokens_per_gpu: int | None = None,
    micro_batch_size: int | None = None,
    rollout_ids: Sequence[RolloutId] | None = None,
    colocate_ids: Sequence[RolloutId] | None = None,
    global_batch_size: int | None = None,
    num_steps: int | None = None,
    cost: CostModel | None = None,
    policy: Policy | None = None,
    forward_only: bool = False,
    prefixes: SharedPrefixes | None = None,
) -> Plan:
    """Plan the micro-batches of a batch of samples.

    Equal arguments give an equal plan in any process: nothing is random, and the search counts
    evaluations, not time.

    Args:
        lengths: tokens per sample before any padding, each at least 1.
        layout: how the model is spread over GPUs.
        max_tokens_per_gpu: the budget: padded tokens that a row may hold on one GPU, after CP. A
            row holds at most this times cp. None makes a count-based plan.
        micro_batch_size: samples per micro-batch of a count-based plan.
        rollout_ids: per sample an int or str; samples with the same id stay in one step. None: each
            sample (or each colocated set) is its own rollout, and the id is its index.
        colocate_ids: per sample an int or str; samples with the same id stay in one micro-batch, as
            pairs of a preference loss must. They belong to one rollout. None: no sample has to
            share a micro-batch.
        global_batch_size: rollouts per step; the last step gets the rest.
        num_steps: number of steps, of about equal tokens, in place of global_batch_size. Without
            either number, there is one step.
        cost: seconds of a micro-batch; None counts tokens.
        policy: what the planner may choose; None for the defaults.
        forward_only: plan a pass without backwards.
        prefixes: tokens that samples have in common at their beginnings; under
            `Policy(share_prefixes="auto")` a row holds them once, where that pays. None: nothing is
            shared.

    Raises:
        DataError: invalid lengths, ids or prefixes.
        ConfigError: arguments that contradict each other.
        PlanError: the policy allows no legal plan; the message says what to set.
    """
    policy = policy or Policy()
    check_policy(policy, layout, micro_batch_size)
    if cost is not None:
        cost.weights_for(layout)
        cost.factors_for(layout)
    rows = layout.rounding(policy.round_row_tokens)
    batch = _read_batch(lengths, rollout_ids, colocate_ids, rows)
    if max_tokens_per_gpu is None and micro_batch_size is None:
        raise ConfigError(
            "neither of max_tokens_per_gpu and micro_batch_size given; set max_tokens_per_gpu="
            f"{-(-int(batch.aligned.max()) // layout.cp)} or more, which holds the longest sample"
        )
    budget = read_budget(rows, max_tokens_per_gpu, micro_batch_size)
    _check_set_sizes(batch, micro_batch_size)
    _check_cost(batch, layout, cost)
    planner = partial(
        build_dp_schedule,
        batch.lengths,
        layout=layout,
        max_tokens_per_gpu=max_tokens_per_gpu,
        micro_batch_size=micro_batch_size,
        rollout_ids=batch.ids,
        colocate_ids=batch.colocate_ids,
        global_batch_size=global_batch_size,
        num_steps=num_steps,
        cost=cost,
        forward_only=forward_only,
        prefixes=prefixes,
    )
    step = Step(
        number=0,
        lengths=batch.lengths,
        layout=rows,
        policy=policy,
        cost=cost,
        budget=budget,
        max_samples=None if micro_batch_size is None else int(micro_batch_size),
        forward_only=forward_only,
    )
    row_lengths = policy.row_lengths(layout, step.capacity)
    if row_lengths:
        rows = layout.rounding(policy.round_row_tokens, row_lengths)
        budget = read_budget(rows, max_tokens_per_gpu, micro_batch_size)
    explainer = partial(explain, planner=planner, cost=cost, has_prefixes=prefixes is not None)
    table = _prefix_table(prefixes, batch, rows, policy)
    step = replace(step, layout=rows, budget=budget, prefixes=table)
    _check_oversize(batch, budget, rows, policy, table)
    steps = split_rollouts(
        batch.rollout_tokens(),
        global_batch_size=global_batch_size,
        num_steps=num_steps,
        step_split=policy.step_split,
    )
    planned = []
    for number, samples in enumerate(batch.steps(steps)):
        own = replace(step, number=number)
        items = Items.whole(own, samples, batch.item_of[samples])
        planned.append(_plan_step(items, batch))
    used = None
    if table is not None and any(mb.shared_tokens for p in planned for mb in p.microbatches):
        used = table.prefixes
    return Plan(
        steps=tuple(planned),
        layout=layout,
        policy=policy,
        max_tokens_per_gpu=None if max_tokens_per_gpu is None else int(max_tokens_per_gpu),
        micro_batch_size=None if micro_batch_size is None else int(micro_batch_size),
        num_samples=batch.lengths.size,
        rollout_ids=batch.ids,
        colocate_ids=batch.colocate_ids,
        forward_only=forward_only,
        prefixes=used,
        row_lengths=row_lengths,
        _explainer=explainer,
    )


@dataclass(frozen=True)
class _Batch:
    """All samples, n of them, of R rollouts."""

    lengths: Ints
    aligned: Ints
    rollout_of: Ints
    """int64 [n]: each sample's rollout, numbered in order of first appearance."""
    ids: Ids | None
    """Per sample its rollout's id; None if no ids were given."""
    item_of: Ints
    """int64 [n]: each sample's item, numbered in order of first appearance. Samples of one item are
    packed into one row."""
    colocate_ids: Ids | None
    """Per sample its colocate id; None if no ids were given."""

    @cached_property
    def names(self) -> Sequence[RolloutId]:
        """The id of each rollout number."""
        return range(self.lengths.size) if self.ids is None else tuple(dict.fromkeys(self.ids))

    def names_of(self, rollouts: Ints) -> tuple[RolloutId, ...]:
        """The ids of rollout numbers."""
        numbers = rollouts.tolist()
        if self.ids is None:
            return tuple(numbers)  # A range numbers itself.
        return tuple(map(self.names.__getitem__, numbers))

    def rollout_tokens(self) -> Ints:
        """int64 [R]: aligned tokens of each rollout."""
        tokens = np.zeros(len(self.names), dtype=np.int64)
        np.add.at(tokens, self.rollout_of, self.aligned)
        return tokens

    def steps(self, rollouts: Sequence[Ints]) -> Iterator[Ints]:
        """The samples of each step, from the rollouts of each.

        They are sorted by rollout, and then by item, so that a prefix of the step's rollouts is a
        prefix of its items: "drop" plans such a prefix.
        """
        step_of = np.empty(len(self.names), dtype=np.int64)
        for number, own in enumerate(rollouts):
            step_of[own] = number
        order = np.lexsort((self.item_of, self.rollout_of, step_of[self.rollout_of]))
        sizes = np.bincount(step_of[self.rollout_of], minlength=len(rollouts))
        yield from np.split(order, np.cumsum(sizes)[:-1])


def _read_batch(
    lengths: Sequence[int] | Ints,
    rollout_ids: Sequence[RolloutId] | None,
    colocate_ids: Sequence[RolloutId] | None,
    layout: Layout,
) -> _Batch:
    flat = read_lengths(lengths)
    sets = read_sets(rollout_ids, colocate_ids, flat.size)
    return _Batch(flat, layout.aligned_sample_tokens(flat), *sets)


def _prefix_table(
    prefixes: SharedPrefixes | None, batch: _Batch, layout: Layout, policy: Policy
) -> PrefixTable | None:
    """The prefixes that pay; None if none does, or the policy shares nothing."""
    if prefixes is None:
        return None
    if not isinstance(prefixes, SharedPrefixes):
        raise ConfigError(
            f"prefixes={brief(prefixes)}; give SharedPrefixes, for example from_samples(token_ids)"
        )
    prefixes.check(batch.lengths)
    if policy.share_prefixes == "off":
        return None
    kept = worthwhile(prefixes, batch.aligned, layout)
    return PrefixTable(kept, batch.lengths.size, layout) if kept.order else None


def _plan_step(items: Items, batch: _Batch) -> StepPlan:
    rollouts, num_items = np.unique(
        batch.rollout_of[items.samples[items.first_samples]], return_counts=True
    )
    ids = batch.names_of(rollouts)
    if items.step.prefixes is not None and batch.colocate_ids is not None:
        items = items.sharing()
    kept, num_kept = keep_reachable(items, np.cumsum(num_items))
    return best_draft(kept).to_plan(ids[:num_kept], ids[num_kept:])


def _check_cost(batch: _Batch, layout: Layout, cost: CostModel | None) -> None:
    """Raise ConfigError if sums of seconds could overflow; the search compares such sums."""
    if cost is None:
        return
    tokens = int(batch.aligned.sum())
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


def _check_set_sizes(batch: _Batch, micro_batch_size: int | None) -> None:
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


def _check_oversize(
    batch: _Batch, budget: int | None, layout: Layout, policy: Policy, table: PrefixTable | None
) -> None:
    """Raise PlanError for items over the budget, or log them if they may be planned.

    A colocated set is as large as the positions that a row of its samples holds. Under
    oversize="alone" such an item may have a row of its own. Under context_parallel="dynamic" it
    goes over several DP ranks, whatever `oversize` says, and must fit on some number of them.
    """
    if budget is None:
        return
    tokens = _item_tokens(batch, layout, table, 1)
    over = np.flatnonzero(tokens > budget)
    if not over.size:
        return
    dynamic = policy.context_parallel == "dynamic"
    if policy.split_samples == "auto":
        alone = np.bincount(batch.item_of)[over] == 1
        if alone.any():
            logger.info(
                "%d sample(s) over the budget of %d padded tokens per row are cut into pieces",
                int(alone.sum()),
                budget,
            )
        over = over[~alone]
        if not over.size:
            return
    if dynamic:
        least = _least_budgets(batch, layout, policy, table)
        beyond = over[least[over] > budget]
        over = beyond if beyond.size else over
    samples = np.flatnonzero(batch.item_of == over[0]).tolist()
    held = int(layout.aligned_row_tokens(int(tokens[over[0]])))
    name = f"sample {samples[0]}"
    kind = "sample(s)"
    if batch.colocate_ids is not None:
        name = f"samples {samples} of colocate id {batch.colocate_ids[samples[0]]!r}"
        kind = "colocated set(s)"
    lengths = batch.lengths[samples].tolist()
    what = (
        f"{over.size} {kind} over the budget of {budget} padded tokens per row (max_tokens_per_gpu "
        f"* cp={layout.cp}, rounded down to {layout.row_alignment}); the first is {name}: "
        f"{sum(lengths)} tokens, {held} padded"
    )
    if dynamic and beyond.size:
        wanted = -(-int(least[beyond].max()) // layout.cp)
        widest = policy.widths(layout)[-1]
        raise PlanError(
            f"{what}, which no aligned block of up to {widest} of dp={layout.dp} ranks holds "
            f"(context_parallel='dynamic'); set max_tokens_per_gpu to {wanted} or more"
        )
    if dynamic:
        logger.info("%s; each goes over as many DP ranks as hold it", what)
        return
    if policy.row_shapes is not None:
        raise PlanError(f"{what}; raise max_tokens_per_gpu or set row_shapes=None")
    if policy.oversize == "error":
        raise PlanError(f"{what}; raise max_tokens_per_gpu or set oversize='alone'")
    logger.warning("%s; each is alone in its row", what)


def _item_tokens(batch: _Batch, layout: Layout, table: PrefixTable | None, width: int) -> Ints:
    """int64 [I]: padded tokens of each item in a row over `width` DP ranks."""
    tokens = np.zeros(int(batch.item_of.max()) + 1, dtype=np.int64)
    np.add.at(tokens, batch.item_of, layout.over(width).aligned_sample_tokens(batch.lengths))
    if table is not None and batch.colocate_ids is not None:
        everyone = np.arange(batch.item_of.size)
        tokens -= table.over(width).saved(everyone, batch.item_of, tokens.size)[0]
    return tokens


def _least_budgets(
    batch: _Batch, layout: Layout, policy: Policy, table: PrefixTable | None
) -> Ints:
    """int64 [I]: the least budget of a row of one DP rank with which some width holds each item.

    At cp=1, 100 tokens over four ranks are padded to 104, of which each rank holds 26.
    """
    least = _item_tokens(batch, layout, table, 1)
    for width in policy.widths(layout)[1:]:
        tokens = _item_tokens(batch, layout, table, width)
        row = layout.over(width).aligned_row_tokens(tokens)
        least = np.minimum(least, -(-row // width))
    return np.asarray(round_up(least, layout.row_alignment), dtype=np.int64)
