"""A dry run of the main job: the checks of its start, the plan, seconds and memory of a batch.

    config, ranks -> check_start -> first_batch -> predict

It needs no GPU, process group or torch, and calls the same functions as the run.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from megapack.base.arrays import Ints
from megapack.cost.memory import GpuMemory
from megapack.cost.model import CostModel
from megapack.images import Images
from megapack.job.config.sections import TrainConfig, check_installed
from megapack.job.data.batches import (
    all_batches,
    batch_advantages,
    batch_prefixes,
    batch_rewards,
    open_dataset,
    plan_logprobs,
    plan_steps,
)
from megapack.job.data.gae import checked_rewards
from megapack.job.data.generated import LONGEST_OVER_MEAN, generate_lengths
from megapack.layout import Layout
from megapack.outlook.stats import PlanReport, full_rows, plan_report
from megapack.plan.plan import Plan
from megapack.prefixes import SharedPrefixes


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Input of the first batch's plan."""

    lengths: Ints
    """int64 [samples]."""
    rollout_ids: list[int]
    pair_ids: list[int] | None
    """See `Dataset.pair_ids`."""
    source: str
    """Where the lengths come from, in one line for people."""
    prefixes: SharedPrefixes | None = None
    """What rows may share; None without `plan.share_prefixes`, and for lengths without tokens."""
    images: list[Images] | None = None
    """Those of each sample; None = no sample has images."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted seconds and memory of the first batch."""

    plan: Plan
    steps: PlanReport
    """Forward and backward of all optimizer steps."""
    logprobs: PlanReport | None
    """One log-prob pass over the batch, the mean if the first one alone encodes images; None if
    the objective needs no log-probs."""
    num_logprob_passes: int
    critic_steps: PlanReport | None
    """The critic's forward and backward of all optimizer steps; None without a critic."""
    values: PlanReport | None
    """The pass for the critic's values; None without a critic."""
    memory: tuple[GpuMemory, ...]
    """Each stage with every row in flight as long as the budget, as may happen in a later batch."""

    @property
    def seconds(self) -> float:
        """Seconds of the steps and of the passes before them, the critic's included."""
        passes = self.num_logprob_passes * self.logprobs.seconds if self.logprobs else 0.0
        others = (self.critic_steps, self.values)
        return self.steps.seconds + passes + sum(report.seconds for report in others if report)

    @property
    def tokens_per_gpu_second(self) -> float:
        """Real tokens of the batch per second and GPU, with the passes before the steps."""
        return self.steps.tokens / self.seconds / self.plan.layout.world_size

    @property
    def fullest_stage(self) -> GpuMemory:
        """Memory of the stage that needs the most."""
        return max(self.memory, key=lambda stage: stage.total)


def check_start(config: TrainConfig, world_size: int) -> Layout:
    """Make the checks of a run's start; returns its layout on this many ranks.

    Raises:
        ConfigError: a tracker is not installed; see `TrainConfig.checked_layout`.
    """
    check_installed(config.train.trackers)
    return config.checked_layout(world_size)


def first_batch(config: TrainConfig) -> Batch:
    """Lengths of the run's first batch; generated if `data.path` is null.

    Raises:
        DataError: a file cannot be read, or a sample is bad or has no reward or advantage.
    """
    data = config.data
    if data.path is None:
        longest = config.longest_sample
        num_rollouts = data.prompts_per_batch * data.generated_group_size
        rollouts = list(range(num_rollouts))
        pairs = sorted(rollouts * 2) if config.objective.reads_pairs else None
        num_samples = num_rollouts if pairs is None else len(pairs)
        lengths = generate_lengths(num_samples, longest, data.generated_seed)
        return Batch(
            lengths=np.array(lengths),
            rollout_ids=rollouts if pairs is None else pairs,
            pair_ids=pairs,
            source=f"data.path is null: lengths drawn, lognormal of mean {longest} / "
            f"{LONGEST_OVER_MEAN}, at most {longest}",
        )
    dataset = open_dataset(config)
    _, _, rows = next(all_batches(config, dataset))
    if config.critic.enabled:
        checked_rewards(batch_rewards(config.objective, dataset, rows))
    elif config.objective.reads_rewards:
        batch_advantages(config.objective, dataset, rows)
    return Batch(
        lengths=np.array(dataset.prompt_tokens(rows)) + np.array(dataset.response_tokens(rows)),
        rollout_ids=dataset.rollout_ids(rows),
        pair_ids=dataset.pair_ids(rows),
        source=f"the first batch of {len(dataset)} samples in {data.path}",
        prefixes=batch_prefixes(
            config.row_plan,
            dataset,
            rows,
            mtp_num_layers=config.model.mtp_num_layers,
            replays_routes=config.train.routing_replay == "rollout",
        ),
        images=dataset.images(rows) if config.model.vision != "off" else None,
    )


def predict(
    config: TrainConfig,
    layout: Layout,
    batch: Batch,
    cost: CostModel,
    critic_cost: CostModel | None = None,
) -> Prediction:
    """Plan the batch as the run would, and simulate it.

    Args:
        cost: for the prediction; the plan is made with the run's, `config.cost_model`.
        critic_cost: for the prediction of a critic; None = `cost`, which is too much by the
            vocabulary head.

    Raises:
        PlanError: no legal plan under the policy; the message says what to set.
    """
    planning_cost = config.cost_model(layout)
    lengths = batch.lengths.tolist()
    settings = (config.row_plan, layout, planning_cost, lengths)
    shared = batch.prefixes, batch.images
    plan = plan_steps(*settings, batch.rollout_ids, batch.pair_ids, *shared)
    logprobs = critic_steps = values = None
    critic_cost, later = critic_cost or cost, 1.0
    if num_passes := config.objective.num_logprob_passes:
        # A frozen tower has encoded all images in the first pass.
        later = 0.0 if config.model.vision == "frozen" else 1.0
        forward_plan = plan_logprobs(*settings, *shared)
        forward_plan = forward_plan or dataclasses.replace(plan, forward_only=True)
        mean = (1 + later * (num_passes - 1)) / num_passes
        logprobs = plan_report(forward_plan, batch.lengths, _encoding(cost, mean))
        if config.critic.enabled:
            critic_steps = plan_report(plan, batch.lengths, _encoding(critic_cost, later))
            values = plan_report(forward_plan, batch.lengths, critic_cost)
    return Prediction(
        plan=plan,
        steps=plan_report(plan, batch.lengths, _encoding(cost, later)),
        logprobs=logprobs,
        num_logprob_passes=num_passes,
        critic_steps=critic_steps,
        values=values,
        memory=_memory(config, plan),
    )


def _encoding(cost: CostModel, share: float) -> CostModel:
    """The cost model with this share of the seconds of encoding images."""
    per_patch, per_patch_sq = share * cost.per_patch, share * cost.per_patch_sq
    return dataclasses.replace(cost, per_patch=per_patch, per_patch_sq=per_patch_sq)


def _memory(config: TrainConfig, plan: Plan) -> tuple[GpuMemory, ...]:
    """Memory of each stage with full rows in flight. A sample over the budget is a longer row, and
    a row over several DP ranks is cut over all of their GPUs."""
    layout = plan.layout
    model = config.memory_model()
    rows = (mb for step in plan.steps for mb in step.microbatches)
    longest = max(-(-mb.row_tokens // (layout.cp * mb.width)) for mb in rows)
    held = full_rows(plan, max(plan.max_tokens_per_gpu or 0, longest))
    return tuple(model.stage(layout, stage, **held) for stage in range(layout.pp))
