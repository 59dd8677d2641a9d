"""What another cost model's plan would have cost.

Samples of each step -> a plan by each cost model -> seconds, all by one of the models
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megapack.base.arrays import Ids, Ints, read_lengths
from megapack.cost.model import CostModel
from megapack.dp_schedule import build_dp_schedule
from megapack.errors import PlanError
from megapack.pipeline.simulator import simulate_planned
from megapack.plan.plan import Plan
from megapack.planner.explain import quiet_planner


def replanned_seconds(
    plan: Plan, lengths: Sequence[int] | Ints, costs: Sequence[CostModel], true: CostModel
) -> list[float]:
    """Simulated seconds of a plan's steps, planned anew by each of several cost models.

    A step keeps its samples, and the plan its layout, budget and policy. The new plans share no
    prefixes, of which a plan says too little.

    Args:
        plan: the steps of a batch.
        lengths: real tokens of each sample, as they were planned.
        costs: the models to plan with.
        true: the model that all plans are simulated with.

    Returns:
        For each model of `costs` the seconds of all steps, one after the other.

    Raises:
        PlanError: lengths of another batch, or samples that the policy refuses.
        ConfigError: stage weights that do not fit the layout.
    """
    flat = read_lengths(lengths)
    if flat.size != plan.num_samples:
        raise PlanError(f"{flat.size} lengths for a plan of {plan.num_samples} samples")
    policy = replace(plan.policy, share_prefixes="off")
    totals = [0.0] * len(costs)
    for step in plan.steps:
        samples = step.kept_samples
        for number, cost in enumerate(costs):
            with quiet_planner():
                planned = build_dp_schedule(
                    flat[list(samples)],
                    layout=plan.layout,
                    max_tokens_per_gpu=plan.max_tokens_per_gpu,
                    micro_batch_size=plan.micro_batch_size,
                    rollout_ids=_of(plan.rollout_ids, samples),
                    colocate_ids=_of(plan.colocate_ids, samples),
                    cost=cost,
                    policy=policy,
                    forward_only=plan.forward_only,
                )
            totals[number] += simulate_planned(planned, planned.steps[0], true).makespan
    return totals


def _of(ids: Ids | None, samples: Sequence[int]) -> Ids | None:
    return None if ids is None else tuple(ids[i] for i in samples)
