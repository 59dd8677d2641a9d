"""A pass once more, in rows of half the size: what the main job does about a GPU out of memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megapack.batch_plan import plan_logprobs, plan_steps
from megapack.errors import StepOutOfMemory
from megapack.plan import Plan, StepPlan
from megapack.planned_batch import BatchPlanner, PlannedBatch
from megapack.train_config import PlanConfig


def replan_step(planner: BatchPlanner, batch: PlannedBatch, index: int) -> PlannedBatch:
    """The samples of one step as a batch of their own, of one step.

    Args:
        batch, index: what ran out of memory.

    Raises:
        StepOutOfMemory: every row holds one sample already.
        PlanError, ConfigError: no plan has such rows.
    """
    step, samples = batch.plan.steps[index], batch.samples
    kept = list(step.kept_samples)
    fields = {n: [samples.field(n, i) for i in kept] for n in samples.field_names}
    # The step keeps what it kept, also where half of it would not be reachable by splitting.
    config = dataclasses.replace(
        halved(planner.config, (step,)),
        forward_max_tokens_per_gpu=None,
        unreachable="pad",
        oversize="alone",
    )
    return dataclasses.replace(planner, config=config).plan(batch.rows[kept], fields)


def replan_logprobs(planner: BatchPlanner, batch: PlannedBatch) -> Plan:
    """One pass over the whole batch in place of its `forward_plan`; its samples get their tokens.

    Raises:
        StepOutOfMemory, PlanError, ConfigError: as `replan_step` does.
    """
    config, lengths = halved(planner.config, batch.forward_plan.steps), batch.samples.lengths
    planned = plan_logprobs(config, planner.layout, planner.cost, lengths)
    if planned is None:
        # Count-based: the rows of one step with all samples.
        ids = planner.data.rollout_ids(batch.rows)
        planned = plan_steps(config, planner.layout, planner.cost, lengths, ids)
    planner.data.give_tokens(batch.samples, batch.rows, (planned,), planner.dp_rank)
    return planned


def halved(config: PlanConfig, steps: Sequence[StepPlan]) -> PlanConfig:
    """The settings for one step of all samples, with half of the largest row of these steps as the
    budget.

    Raises:
        StepOutOfMemory: every row holds one sample already; every rank finds the same.
    """
    microbatches = [mb for step in steps for mb in step.microbatches]
    tokens = max(mb.padded_tokens for mb in microbatches)
    num_samples = max(len(mb.samples) for mb in microbatches)
    if num_samples < 2:
        raise StepOutOfMemory(
            f"a GPU ran out of memory though each row holds one sample, of up to {tokens} padded "
            "tokens; set data.max_length, model.recompute, or a layout with more stages"
        )
    is_counted, budget = config.max_tokens_per_gpu is None, max(tokens // 2, 1)
    is_forward_counted = is_counted and config.forward_max_tokens_per_gpu is None
    return dataclasses.replace(
        config,
        global_batch_size=None,
        num_steps=None,
        micro_batch_size=num_samples // 2 if is_counted else None,
        max_tokens_per_gpu=None if is_counted else budget,
        forward_max_tokens_per_gpu=None if is_forward_counted else budget,
    )
