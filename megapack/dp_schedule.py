"""`build_dp_schedule`: sample lengths -> `Plan`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from megapack.base.arrays import Ints, read_budget
from megapack.cost.model import CostModel, cost_in_tokens
from megapack.errors import ConfigError, PlanError
from megapack.images import Images, checked_images
from megapack.layout import Layout
from megapack.pipeline.simulator import simulate
from megapack.plan.plan import Plan, RolloutId, StepPlan
from megapack.planner.batch import Batch
from megapack.planner.counts import keep_reachable, split_rollouts
from megapack.planner.explain import explain, quiet_planner
from megapack.planner.images import with_images
from megapack.planner.items import Items
from megapack.planner.refusals import check_cost, check_oversize, check_set_sizes
from megapack.planner.search import best_draft
from megapack.planner.step import Step
from megapack.policy import Policy, check_policy
from megapack.prefixes import SharedPrefixes

# A plan of rows of one adapter each costs nothing if it is slower by less than this part.
_NOTHING = 0.002


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
    images: Sequence[Images] | None = None,
    adapter_ids: Sequence[RolloutId] | None = None,
) -> Plan:
    """Plan the steps and micro-batches of a batch from its samples' lengths.

        layout = Layout(dp=2, pp=2, vpp=2)
        plan = build_dp_schedule([3000, 500, 1200, 700], layout=layout, max_tokens_per_gpu=4096)
        print(plan)

    Each rank calls it for itself: equal arguments give an equal plan in any process.

    Args:
        lengths: tokens of each sample before any padding, at least 1.
        layout: how the model is spread over GPUs.
        max_tokens_per_gpu: the budget: padded tokens of a micro-batch on one GPU, after CP. A
            row holds at most this times cp. None makes a count-based plan.
        micro_batch_size: samples per micro-batch, for a plan by number instead of by tokens.
        rollout_ids: per sample an int or str; samples of one id stay in one step. None: each
            sample (or each colocated set) is its own rollout, and the id is its index.
        colocate_ids: per sample an int or str; samples of one id stay in one micro-batch. Pairs of
            a preference loss must. They belong to one rollout. None: no sample has to share a
            micro-batch.
        global_batch_size: rollouts per step; the last step gets the rest.
        num_steps: number of steps, of about equal tokens, instead of `global_batch_size`. Without
            either number, there is one step.
        cost: seconds of a micro-batch; None: what `megapack plan` assumes.
        policy: what the planner may do; None: the defaults.
        forward_only: plan a pass without backwards.
        prefixes: tokens that samples share at their beginnings; None: nothing is shared. Under
            `Policy(share_prefixes="auto")` a row holds them once, where that pays.
        images: per sample its `ImageRef`s; see `Policy.images`. None: no sample has one.
        adapter_ids: each sample's adapter, int or str. A row has the samples of an adapter side by
            side, adapters ascending; see `Policy.adapters`. Samples of different adapters share no
            prefix. None: all have one adapter, or none.

    Returns:
        A plan that `check_plan` accepts.

    Raises:
        DataError: invalid lengths, ids, prefixes or images.
        ConfigError: arguments that contradict each other.
        PlanError: no legal plan exists; the message says what to set.
    """
    # Nothing is random, and the search counts evaluations, not time.
    policy = policy or Policy()
    check_policy(policy, layout, micro_batch_size)
    rows = layout.rounding(policy.round_row_tokens)
    batch = Batch.read(lengths, rollout_ids, colocate_ids, adapter_ids)
    if max_tokens_per_gpu is None and micro_batch_size is None:
        longest = int(rows.aligned_sample_tokens(batch.lengths).max())
        raise ConfigError(
            "neither of max_tokens_per_gpu and micro_batch_size given; set max_tokens_per_gpu="
            f"{-(-longest // layout.cp)} or more, which holds the longest sample"
        )
    request = Request(
        batch=batch,
        layout=layout,
        max_tokens_per_gpu=max_tokens_per_gpu,
        micro_batch_size=micro_batch_size,
        global_batch_size=global_batch_size,
        num_steps=num_steps,
        cost=cost or cost_in_tokens(layout),
        forward_only=forward_only,
        prefixes=prefixes,
        images=None if images is None else checked_images(images, batch.lengths.tolist()),
    )
    # Before the sets: it refuses an invalid budget.
    request.step(policy)
    check_set_sizes(batch, micro_batch_size)
    check_cost(batch, layout, request.cost)
    return request.plan(policy)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is planned, whatever the policy."""

    batch: Batch
    layout: Layout
    max_tokens_per_gpu: int | None
    micro_batch_size: int | None
    global_batch_size: int | None
    num_steps: int | None
    cost: CostModel
    forward_only: bool
    prefixes: SharedPrefixes | None
    images: list[Images] | None

    def step(self, policy: Policy) -> Step:
        """What its steps have in common, but for prefixes."""
        rows = self.layout.rounding(policy.round_row_tokens)
        step = Step(
            number=0,
            lengths=self.batch.lengths,
            layout=rows,
            policy=policy,
            cost=self.cost,
            budget=self._budget(rows),
            max_samples=_as_int(self.micro_batch_size),
            forward_only=self.forward_only,
            adapter_of=None if self.batch.adapter_ids is None else self.batch.adapter_of,
            **(self._row_images() if policy.images == "row" else {}),
        )
        row_lengths = policy.row_lengths(self.layout, step.capacity)
        if not row_lengths:
            return step
        rows = self.layout.rounding(policy.round_row_tokens, row_lengths)
        return replace(step, layout=rows, budget=self._budget(rows))

    def _planned(self, step: Step, samples: Ints) -> StepPlan:
        """The plan of a step. Rows have one adapter each where that costs nothing."""
        plan = self._plan_step(step, samples)
        adapter_of = step.adapter_of
        if adapter_of is None or step.policy.adapters == "one" or not np.ptp(adapter_of[samples]):
            return plan
        one = replace(step, policy=replace(step.policy, adapters="one"))
        settings: dict[str, Any] = {"layout": self.layout, "cost": self.cost}
        settings |= {"lockstep": step.lockstep, "forward_only": step.forward_only}
        # Some freedoms refuse it, and a cap on live tokens may leave no such rows.
        with suppress(ConfigError, PlanError), quiet_planner():
            check_policy(one.policy, self.layout, self.micro_batch_size)
            pure = self._plan_step(one, samples)
            mixed_s, pure_s = (simulate(own, **settings).makespan for own in (plan, pure))
            drops = len(pure.dropped_rollouts) > len(plan.dropped_rollouts)
            if not drops and pure_s <= mixed_s * (1 + _NOTHING):
                return pure
        return plan

    def _plan_step(self, step: Step, samples: Ints) -> StepPlan:
        """The plan of a step, planned in one way, with its images."""
        batch = self.batch
        items = Items.whole(step, samples, batch.item_of[samples])
        rollouts, num_items = np.unique(
            batch.rollout_of[items.samples[items.first_samples]], return_counts=True
        )
        ids = batch.names_of(rollouts)
        if step.prefixes is not None and batch.colocate_ids is not None:
            items = items.sharing()
        kept, num_kept = keep_reachable(items, np.cumsum(num_items))
        plan = best_draft(kept).to_plan(ids[:num_kept], ids[num_kept:])
        if self.images is None:
            return plan
        return with_images(plan, self.images, self.layout, self.cost, step.policy.images)

    def _row_images(self) -> dict[str, Any]:
        """The fields of `Step` about images in rows."""
        if self.images is None:
            return {}
        patches = [np.array([ref.patches for ref in refs], dtype=np.int64) for refs in self.images]
        return {
            "image_seconds": np.array([self.cost.image_seconds(own).sum() for own in patches]),
            "patches": np.array([own.sum() for own in patches]),
        }

    def _budget(self, rows: Layout) -> int | None:
        return read_budget(rows, self.max_tokens_per_gpu, self.micro_batch_size)

    def plan(self, policy: Policy) -> Plan:
        """The plan under a policy.

        Raises:
            ConfigError, DataError, PlanError: see `build_dp_schedule`.
        """
        check_policy(policy, self.layout, self.micro_batch_size)
        batch = self.batch
        step = self.step(policy)
        table = batch.prefix_table(self.prefixes, step.layout, policy)
        step = replace(step, prefixes=table)
        check_oversize(batch, step)
        rollouts = split_rollouts(
            batch.rollout_tokens(self.layout.rounding(policy.round_row_tokens)),
            global_batch_size=self.global_batch_size,
            num_steps=self.num_steps,
            step_split=policy.step_split,
        )
        steps = tuple(
            self._planned(replace(step, number=n), own)
            for n, own in enumerate(batch.steps(rollouts))
        )
        shares = any(mb.shared_tokens for planned in steps for mb in planned.microbatches)
        return Plan(
            steps=steps,
            layout=self.layout,
            policy=policy,
            max_tokens_per_gpu=_as_int(self.max_tokens_per_gpu),
            micro_batch_size=_as_int(self.micro_batch_size),
            num_samples=batch.lengths.size,
            rollout_ids=batch.ids,
            colocate_ids=batch.colocate_ids,
            adapter_ids=batch.adapter_ids,
            forward_only=self.forward_only,
            prefixes=table.prefixes if table is not None and shares else None,
            row_lengths=tuple(n // self.layout.cp for n in step.layout.row_lengths),
            _explainer=partial(
                explain,
                planner=self.plan,
                cost=self.cost,
                has_prefixes=self.prefixes is not None,
            ),
        )


def _as_int(number: int | None) -> int | None:
    """A number that is one of numpy's as Python's."""
    return None if number is None else int(number)
