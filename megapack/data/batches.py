"""What a config makes of its data without a GPU: samples, their batches, plans of a batch.

TrainConfig -> open_dataset -> batches -> plan_steps, plan_logprobs -> Plan
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from megapack.config.sections import PlanConfig, TrainConfig
from megapack.cost.model import CostModel
from megapack.data.dataset import Dataset, Rows
from megapack.data.generated import generate_rollouts
from megapack.data.index import ReadSettings
from megapack.dp_schedule import build_dp_schedule
from megapack.layout import Layout
from megapack.plan.plan import Plan


def open_dataset(config: TrainConfig) -> Dataset:
    """The file that the config names, or generated rollouts."""
    data = config.data
    if data.path is None:
        groups = data.num_generated // data.generated_group_size
        return Dataset.from_rollouts(
            generate_rollouts(groups, data.generated_group_size, data.generated_seed)
        )
    settings = ReadSettings(
        vocab_size=config.model.vocab_size,
        max_length=config.longest_sample,
        overlong=data.overlong,
    )
    return Dataset.from_files(data.path, settings, Path(config.runs_dir) / ".index")


def all_batches(config: TrainConfig, data: Dataset) -> Iterator[tuple[int, int, Rows]]:
    """Epoch, number in it, and rows of each batch of the run, one at a time."""
    every = (
        (epoch, index, batch)
        for epoch in range(config.train.epochs)
        for index, batch in enumerate(
            data.batches(
                config.data.prompts_per_batch,
                shuffle=config.data.shuffle,
                seed=config.seed,
                epoch=epoch,
            )
        )
    )
    return itertools.islice(every, config.train.num_batches)


def steps_in(config: TrainConfig, data: Dataset, rows: Rows) -> int:
    """Optimizer steps that a batch becomes."""
    if config.plan.num_steps is not None:
        return config.plan.num_steps
    if config.plan.global_batch_size is None:
        return 1
    return -(-data.num_rollouts(rows) // config.plan.global_batch_size)


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
