"""The main job's passes over a batch: log-probs before its steps, and gradients in each of them.

A pass that runs out of memory gets a second attempt in rows of half the size, if the adapter was
made with `retries_oom`; a second failure ends the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from megapack.consensus import agree
from megapack.errors import StepOutOfMemory
from megapack.loss import GRPO, PPO, SFT
from megapack.model_config import ObjectiveConfig
from megapack.objectives import GSPO, AnyObjective
from megapack.pipeline import Simulation, simulate_planned
from megapack.plan import Plan, StepPlan
from megapack.planned_batch import BatchPlanner, PlannedBatch
from megapack.reference import Reference
from megapack.replan import replan_logprobs, replan_step
from megapack.samples import SampleBatch
from megapack.schedule import ScheduleAdapter, StepResult

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class StepGradients:
    """A step whose gradients are in the model."""

    step: StepPlan
    """The rows that ran."""
    simulation: Simulation
    """Of these rows."""
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

    def gradients(self, batch: PlannedBatch, index: int, simulation: Simulation) -> StepGradients:
        """Forward and backward of a step, from gradients of zero.

        Args:
            index: which of the batch's steps.
            simulation: of this step as it is planned.

        Raises:
            StepOutOfMemory, PlanError: also the second attempt failed, or none is possible.
            ScheduleError, RankError: as `ScheduleAdapter.step` does.
        """
        started = time.perf_counter()
        try:
            return self._gradients(batch, index, simulation)
        except StepOutOfMemory as error:
            smaller = self._planned_anew(error, lambda: replan_step(self._planner, batch, index))
        plan = smaller.plan
        simulation = simulate_planned(plan, plan.steps[0], self._planner.cost)
        failed_s = time.perf_counter() - started
        return self._gradients(smaller, 0, simulation, failed_s)

    def _gradients(
        self, batch: PlannedBatch, index: int, simulation: Simulation, failed_s: float = 0.0
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
            step=plan.steps[index],
            simulation=simulation,
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
