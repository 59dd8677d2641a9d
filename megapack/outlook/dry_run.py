"""A run on paper: what its start refuses, the plan of its first batch, its seconds and its bytes.

    config, ranks -> check_start -> first_batch -> predict

No GPU, no process group and no torch; the functions are those that the run itself calls.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from megapack.base.arrays import Ints
from megapack.config.model import check_sizes
from megapack.config.sections import TrainConfig, check_installed
from megapack.cost.memory import GpuMemory
from megapack.cost.model import CostModel
from megapack.data.batches import all_batches, open_dataset, plan_logprobs, plan_steps
from megapack.data.generated import LONGEST_OVER_MEAN, generate_lengths
from megapack.data.rollouts import group_advantages
from megapack.layout import Layout
from megapack.outlook.stats import PlanReport, plan_report
from megapack.plan.plan import Plan
from megapack.policy import check_count_rule


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What the first batch's plan is made from."""

    lengths: Ints
    """int64 [samples]."""
    rollout_ids: list[int]
    source: str
    """Where the lengths come from; one line for people."""

    @property
    def typical_length(self) -> float:
        """Tokens of the sample that a token is in, on average."""
        return float((self.lengths**2).sum() / self.lengths.sum())


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What the first batch takes."""

    plan: Plan
    steps: PlanReport
    """Of forward and backward, all optimizer steps."""
    logprobs: PlanReport | None
    """Of one pass for log-probs over the batch; None where the objective reads none."""
    num_logprob_passes: int
    memory: tuple[GpuMemory, ...]
    """Of each stage, with every row in flight as long as the budget, as in some later batch."""

    @property
    def seconds(self) -> float:
        """Of the steps and the passes before them."""
        passes = self.num_logprob_passes * self.logprobs.seconds if self.logprobs else 0.0
        return self.steps.seconds + passes

    @property
    def tokens_per_gpu_second(self) -> float:
        """Real tokens of the batch over all of its seconds."""
        return self.steps.tokens / self.seconds / self.plan.layout.world_size

    @property
    def fullest_stage(self) -> GpuMemory:
        """The stage that takes most."""
        return max(self.memory, key=lambda stage: stage.total)


def check_start(config: TrainConfig, world_size: int) -> Layout:
    """The layout of a run on this many ranks.

    Raises:
        ConfigError: the ranks do not fill it, it does not divide the model, or a tracker is not
            installed.
        ScheduleError: counts per rank where ranks meet in every micro-batch.
    """
    check_installed(config.train.trackers)
    layout = config.layout.to_layout(world_size, config.model.fp8_rows)
    check_sizes(config.model, layout)
    check_count_rule(
        config.plan.to_policy(), layout, ranks_share_fp8_scales=config.model.fp8 == "delayed"
    )
    return layout


def first_batch(config: TrainConfig) -> Batch:
    """Lengths of the run's first batch; generated ones where `data.path` is null.

    Raises:
        DataError: a file cannot be read, has a bad sample, or lacks what advantages are made from.
    """
    data = config.data
    if data.path is None:
        longest, num_samples = config.longest_sample, _rollouts_per_batch(config)
        lengths = generate_lengths(num_samples, longest, data.generated_seed)
        return Batch(
            lengths=np.array(lengths),
            rollout_ids=list(range(num_samples)),
            source=f"data.path is null: lengths drawn, lognormal of mean {longest} / "
            f"{LONGEST_OVER_MEAN}, at most {longest}",
        )
    dataset = open_dataset(config)
    _, _, rows = next(all_batches(config, dataset))
    if config.objective.kind != "sft":
        group_advantages(dataset.rewards(rows), config.objective.advantage_norm)
    return Batch(
        lengths=np.array(dataset.prompt_tokens(rows)) + np.array(dataset.response_tokens(rows)),
        rollout_ids=dataset.rollout_ids(rows),
        source=f"the first batch of {len(dataset)} samples in {data.path}",
    )


def predict(config: TrainConfig, layout: Layout, batch: Batch, cost: CostModel) -> Prediction:
    """Plan the batch as the run would, and simulate it.

    Args:
        cost: of the prediction. The plan is made with `plan.cost_model`, as in the run.

    Raises:
        PlanError: no legal plan under the policy; says what to set.
    """
    planned_with = config.plan.read_cost(layout)
    lengths = batch.lengths.tolist()
    plan = plan_steps(config.plan, layout, planned_with, lengths, batch.rollout_ids)
    logprobs = None
    if config.objective.kind != "sft":
        passed = plan_logprobs(config.plan, layout, planned_with, lengths)
        passed = passed or dataclasses.replace(plan, forward_only=True)
        logprobs = plan_report(passed, batch.lengths, cost)
    return Prediction(
        plan=plan,
        steps=plan_report(plan, batch.lengths, cost),
        logprobs=logprobs,
        num_logprob_passes=0 if logprobs is None else 1 + (config.objective.kl_coef > 0),
        memory=_memory(config, plan),
    )


def _rollouts_per_batch(config: TrainConfig) -> int:
    return config.data.prompts_per_batch * config.data.generated_group_size


def _memory(config: TrainConfig, plan: Plan) -> tuple[GpuMemory, ...]:
    """Each stage with full rows in flight; a sample over the budget makes a row of its own."""
    layout, model = plan.layout, config.memory_model()
    longest = max(mb.row_tokens for step in plan.steps for mb in step.microbatches)
    row = max(plan.max_tokens_per_gpu or 0, -(-longest // layout.cp))
    group = max(step.group_size or 1 for step in plan.steps)
    live = row * layout.chunks_in_flight(group_size=group) / layout.vpp
    return tuple(
        model.stage(layout, stage, live_tokens=live, row_tokens=row) for stage in range(layout.pp)
    )
