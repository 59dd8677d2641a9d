"""The main job's passes over a batch: log-probs before its steps, and gradients in each of them.

    rows of the data -> BatchPlanner -> PlannedBatch -> BatchPasses -> gradients in the model

A pass that runs out of memory gets a second attempt in rows of half the size, if the adapter was
made with `retries_oom`; a second failure ends the run. The reference policy is a copy of the
weights that log-probs are compared with.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from megapack.config.model import ObjectiveConfig
from megapack.config.sections import PlanConfig
from megapack.cost.model import CostModel
from megapack.data.batches import plan_logprobs, plan_steps
from megapack.data.dataset import Dataset, Rows
from megapack.errors import StepOutOfMemory
from megapack.layout import Layout
from megapack.loss.sequence import GSPO, AnyObjective
from megapack.loss.token import GRPO, PPO, SFT
from megapack.outlook.stats import StepReport, step_report
from megapack.plan.plan import Plan, StepPlan
from megapack.ranks.agree import agree
from megapack.samples import SampleBatch
from megapack.schedule.adapter import ScheduleAdapter, StepResult

_BIAS = "router.expert_bias"


class Reference:
    """The weights that a model has now, kept on the CPU.

    Attributes:
        initial: the kept value of each parameter and expert bias.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        params: list[torch.Tensor] = [p for chunk in chunks for p in chunk.parameters()]
        params += [b for chunk in chunks for n, b in chunk.named_buffers() if n.endswith(_BIAS)]
        self.initial = {p: p.detach().to("cpu", copy=True) for p in params}
        self._trained: dict[torch.Tensor, torch.Tensor] = {}

    @contextlib.contextmanager
    def weights(self) -> Iterator[None]:
        """Within the block the model has its initial weights.

        The trained ones wait on the CPU, in memory that is kept: on the GPU a second copy would
        come on top of gradients and optimizer state.
        """
        for param, initial in self.initial.items():
            self._trained.setdefault(param, torch.empty_like(initial)).copy_(param.detach())
        self._fill(self.initial)
        try:
            yield
        finally:
            self._fill(self._trained)

    def _fill(self, values: Mapping[torch.Tensor, torch.Tensor]) -> None:
        for param, value in values.items():
            param.data.copy_(value)


@dataclass(frozen=True, kw_only=True)
class PlannedBatch:
    """Samples of the data, and what is made of them."""

    rows: Rows
    """Numbers of the samples in the data."""
    samples: SampleBatch
    """Lengths and fields of all of them; tokens of those that this rank packs."""
    plan: Plan
    """The optimizer steps."""
    forward_plan: Plan
    """Of passes for log-probs; `plan` where these take the steps' own rows."""


@dataclass(frozen=True)
class BatchPlanner:
    """Plans batches of the data.

    Args:
        cost: what a row costs; None for its tokens.
        dp_rank: the data-parallel rank that this process runs.
    """

    config: PlanConfig
    layout: Layout
    cost: CostModel | None
    data: Dataset
    dp_rank: int

    def plan(self, rows: Rows, fields: Mapping[str, Sequence[Any]]) -> PlannedBatch:
        """The samples at these rows of the data as a batch; local work.

        Args:
            fields: see `SampleBatch`; one value per row of the data.

        Raises:
            PlanError, ConfigError: no legal plan serves their lengths.
            DataError: as `Dataset.tokens` does.
        """
        samples = SampleBatch.from_lengths(
            self.data.prompt_tokens(rows), self.data.response_tokens(rows), fields
        )
        lengths, ids = samples.lengths, self.data.rollout_ids(rows)
        plan = plan_steps(self.config, self.layout, self.cost, lengths, ids)
        forward_plan = plan_logprobs(self.config, self.layout, self.cost, lengths) or plan
        self.data.give_tokens(samples, rows, (plan, forward_plan), self.dp_rank)
        return PlannedBatch(rows=rows, samples=samples, plan=plan, forward_plan=forward_plan)


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


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class StepGradients:
    """A step whose gradients are in the model."""

    report: StepReport
    """Of the rows that ran."""
    result: StepResult
    measured_s: float
    """Seconds of the attempt that succeeded."""
    failed_s: float
    """Seconds of one before it that ran out of memory, and of planning anew."""


class BatchPasses:
    """Runs what the objective asks of the model. Every rank calls alike: passes are collectives.

    Args:
        config: names the objective.
        adapter: of the model, whose weights now are the reference policy, where there is one.
        optimizer: Megatron's; only its gradients are touched.
        planner: made the batches.
        device: of the collectives.
        on_oom: told, on every rank, of an attempt that failed before the pass is planned anew.

    Attributes:
        objective: what is trained with.
        reference: the reference policy; None where the objective reads none.
        num_oom_replans: passes that were planned anew.
    """

    def __init__(
        self,
        config: ObjectiveConfig,
        adapter: ScheduleAdapter,
        optimizer: Any,
        planner: BatchPlanner,
        *,
        device: torch.device,
        on_oom: Callable[[StepOutOfMemory], None],
    ) -> None:
        self.objective = make_objective(config)
        self.reference = Reference(adapter.chunks) if config.kl_coef else None
        self.num_oom_replans = 0
        self._config, self._adapter, self._optimizer = config, adapter, optimizer
        self._chunks: list[Any] = adapter.chunks
        self._planner, self._device, self._on_oom = planner, device, on_oom

    @property
    def logprob_fields(self) -> list[str]:
        """Fields of a batch that `add_logprobs` fills in."""
        names = ["old_logprobs", *(["ref_logprobs"] if self.reference is not None else [])]
        return [name for name in names if name in self.objective.required_fields]

    def add_logprobs(self, batch: PlannedBatch) -> None:
        """Fill in the log-probs that the objective reads."""
        names, samples = self.logprob_fields, batch.samples
        if "old_logprobs" in names:
            samples.set_field("old_logprobs", self._logprobs(batch))
        if self.reference is not None and "ref_logprobs" in names:
            with self.reference.weights():
                samples.set_field("ref_logprobs", self._logprobs(batch))

    def gradients(self, batch: PlannedBatch, index: int, report: StepReport) -> StepGradients:
        """Forward and backward of a step, from gradients of zero.

        Args:
            index: which of the batch's steps.
            report: of this step as it is planned.

        Raises:
            StepOutOfMemory, PlanError: also the second attempt failed, or none is possible.
            ScheduleError, RankError: as `ScheduleAdapter.step` does.
        """
        started = time.perf_counter()
        try:
            return self._gradients(batch, index, report)
        except StepOutOfMemory as error:
            smaller = self._planned_anew(error, lambda: replan_step(self._planner, batch, index))
        plan = smaller.plan
        report = step_report(plan, plan.steps[0], self._planner.cost)
        failed_s = time.perf_counter() - started
        return self._gradients(smaller, 0, report, failed_s)

    def _gradients(
        self, batch: PlannedBatch, index: int, report: StepReport, failed_s: float = 0.0
    ) -> StepGradients:
        started = time.perf_counter()
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        plan = batch.plan
        result = self._adapter.step(
            plan,
            batch.samples,
            objective=self.objective,
            step=index,
            weighting=self._config.loss_weighting,
            norm_constant=self._config.norm_constant,
            entropy=True,
            next_step=index + 1 if index + 1 < len(plan.steps) else None,
        )
        torch.cuda.synchronize()
        return StepGradients(
            report=report,
            result=result,
            measured_s=time.perf_counter() - started,
            failed_s=failed_s,
        )

    def _logprobs(self, batch: PlannedBatch) -> list[torch.Tensor]:
        """Per sample its tokens' log-probs; 0 for samples that the plan drops."""
        try:
            return self._logprobs_of(batch.samples, batch.forward_plan)
        except StepOutOfMemory as error:
            smaller = self._planned_anew(error, lambda: replan_logprobs(self._planner, batch))
        return self._logprobs_of(batch.samples, smaller)

    def _logprobs_of(self, samples: SampleBatch, plan: Plan) -> list[torch.Tensor]:
        merged = [torch.zeros(())] * len(samples)
        for index in range(len(plan.steps)):
            found = self._adapter.forward(plan, samples, step=index)["logprobs"]
            merged = [old if new is None else new for old, new in zip(merged, found, strict=True)]
        return merged

    def _planned_anew(self, error: StepOutOfMemory, replan: Callable[[], T]) -> T:
        self.num_oom_replans += 1
        self._on_oom(error)
        return agree(replan, device=self._device)


def make_objective(config: ObjectiveConfig) -> AnyObjective:
    """The objective that a config names."""
    if config.kind == "sft":
        return SFT()
    clip: dict[str, Any] = {
        "clip_low": config.clip_low,
        "clip_high": config.clip_high,
        "dual_clip": config.dual_clip,
        "entropy_coef": config.entropy_coef,
    }
    if config.kind == "ppo":
        return PPO(**clip)
    penalty: dict[str, Any] = {"kl_coef": config.kl_coef, "kl_kind": config.kl_kind}
    if config.kind == "gspo":
        return GSPO(**clip, **penalty, kl_level=config.kl_level)
    return GRPO(**clip, **penalty)
