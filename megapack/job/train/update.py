"""An optimizer step of the policy or of a critic: its gradients, its update, its metrics."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megapack.job.gpt.optimizer import check_norm
from megapack.job.train.metrics import training_metrics
from megapack.job.train.passes import BatchPasses, PlannedBatch
from megapack.ranks.links import Ranks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Update:
    """What an optimizer step gave, the same on every rank but for seconds."""

    updated: bool
    """False if Megatron skipped the update."""
    seconds: float
    """Of forward, backward and update."""
    measured_s: float
    """Of forward and backward."""
    metrics: dict[str, Any]


def take_step(
    passes: BatchPasses,
    optimizer: Any,
    schedule: OptimizerParamScheduler,
    ranks: Ranks,
    batch: PlannedBatch,
    index: int,
    *,
    name: str,
    num_steps: int,
    predicted_s: float | None,
) -> Update:
    """Take a model's optimizer step. A collective.

    Args:
        index, num_steps: see `BatchPasses.gradients`.
        name: of the step, for the watchdog.
        predicted_s: seconds that forward and backward should take, or None.
    """
    with ranks.guarded(name, predicted_s):
        result, measured_s = passes.gradients(batch, index, num_steps=num_steps)
        started = time.perf_counter()
        ranks.place.enter("optimizer")
        updated, grad_norm, _ = optimizer.step()
        check_norm(float(grad_norm))
    lr = optimizer.param_groups[0]["lr"]
    schedule.step(increment=1)
    optimizer_s = time.perf_counter() - started
    metrics = {
        **training_metrics(result),
        "grad_norm": float(grad_norm),
        "updated": int(updated),
        "lr": lr,
        "step_measured_s": measured_s,
        "optimizer_s": optimizer_s,
    }
    return Update(
        updated=bool(updated),
        seconds=measured_s + optimizer_s,
        measured_s=measured_s,
        metrics=metrics,
    )
