"""What a config makes of its data before any GPU is needed: the data set, and plans of a batch.

TrainConfig -> open_dataset -> batches -> plan_steps, plan_logprobs -> Plan
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megapack.cost import CostModel
from megapack.dp_schedule import build_dp_schedule
from megapack.layout import Layout
from megapack.plan import Plan
from megapack.train_config import PlanConfig


def plan_steps(
    plan: PlanConfig,
    layout: Layout,
    cost: CostModel | None,
    lengths: Sequence[int],
    rollout_ids: Sequence[int],
) -> Plan:
    """The optimizer steps of a batch; arguments and errors as `build_dp_schedule` has them."""
    return build_dp_schedule(
        lengths,
        layout=layout,
        max_tokens_per_gpu=plan.max_tokens_per_gpu,
        micro_batch_size=plan.micro_batch_size,
        rollout_ids=rollout_ids,
        global_batch_size=plan.global_batch_size,
        num_steps=plan.num_steps,
        cost=cost,
        policy=plan.to_policy(),
    )


def plan_logprobs(
    plan: PlanConfig, layout: Layout, cost: CostModel | None, lengths: Sequence[int]
) -> Plan | None:
    """One pass over all samples with the larger budget of passes without a backward; None where
    these take the steps' own rows."""
    if plan.forward_max_tokens_per_gpu is None:
        return None
    return build_dp_schedule(
        lengths,
        layout=layout,
        max_tokens_per_gpu=plan.forward_max_tokens_per_gpu,
        cost=cost,
        # Every sample's log-probs are needed, also of those that a step may drop.
        policy=dataclasses.replace(plan.to_policy(), unreachable="pad"),
        forward_only=True,
    )
