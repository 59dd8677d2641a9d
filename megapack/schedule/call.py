"""One call of the adapter: what all ranks must agree on, and what packing needs to know."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from megapack.base.choices import Executor, ExecutorChoice
from megapack.errors import DataError
from megapack.loss.token import LossWeighting, Objective, sample_weights
from megapack.plan.executor import choose_executor
from megapack.plan.plan import MicroBatch, Plan, StepPlan
from megapack.rows.outputs import Scope
from megapack.samples import SampleBatch
from megapack.schedule import checks


@dataclass(frozen=True, kw_only=True)
class StepCall:
    """One call of `ScheduleAdapter.step`, or of `forward` if it has no objective."""

    plan: Plan
    batch: SampleBatch
    step: int
    revision: int
    """The batch's revision at the time of the call."""
    entropy: bool
    """Whether the caller asks for the entropy."""
    routing: Sequence[Tensor | None] | None
    objective: Objective | None = None
    weighting: LossWeighting = "token-mean"
    """Only used in training, like `norm_constant`."""
    norm_constant: float | None = None
    scope: Scope = "all"
    """Only used in a forward pass, like `record_routing` and `routing_scope`."""
    record_routing: bool = False
    routing_scope: Scope = "all"
    executor_choice: ExecutorChoice = "auto"
    """See `ScheduleAdapter`."""

    @property
    def executor(self) -> Executor:
        """What runs the rows.

        Raises:
            ConfigError: the choice does not run the plan's orders.
        """
        return choose_executor(self.plan.policy, self.executor_choice)

    @property
    def is_training(self) -> bool:
        """Whether gradients are computed."""
        return self.objective is not None

    @property
    def step_plan(self) -> StepPlan:
        """The step's rows on all ranks."""
        return self.plan.steps[self.step]

    @property
    def has_planned_rows(self) -> bool:
        """Whether rows differ in length; their lengths are in the plan."""
        return self.plan.policy.row_shape == "planned"

    @property
    def has_weight_operations(self) -> bool:
        """Whether some rank runs weight gradients by themselves."""
        lines = (line for rank in self.step_plan.orders for line in rank)
        return self.is_training and any("W" in line for line in lines)

    @property
    def with_entropy(self) -> bool:
        """Whether the entropy is computed."""
        return self.entropy or (self.objective is not None and self.objective.needs_entropy)

    @property
    def field_names(self) -> Sequence[str]:
        """The fields that rows contain."""
        return () if self.objective is None else self.objective.required_fields

    @property
    def text(self) -> str:
        """The call as a text, the same on every rank."""
        replays = self.routing is not None
        if self.objective is None:
            recorded = f"{self.record_routing} {self.routing_scope}"
            return f"forward {self.entropy} {self.scope} {replays} {recorded}"
        objective = _described(self.objective)
        return f"train {self.weighting} {self.norm_constant} {self.entropy} {replays} {objective}"

    @property
    def key(self) -> tuple[object, ...]:
        """Calls with equal keys pack the same rows and need the same agreement."""
        routing = None if self.routing is None else id(self.routing)
        return id(self.plan), id(self.batch), self.revision, self.step, self.text, routing

    def same(self) -> Mapping[str, str]:
        """Values that must be equal on all ranks, by name; errors name the first that differs."""
        batch = self.batch
        counts = repr(batch.num_loss_tokens).encode()
        return {
            "step number": str(self.step),
            "plan": self.plan.digest(),
            "field names": ", ".join(sorted(batch.field_names)),
            "call": self.text,
            "executor": self.executor_choice,
            "counts of loss tokens": hashlib.sha256(counts).hexdigest(),
            "tensor fields": batch.tensor_signature,
            "images": batch.image_signature,
        }

    def rows(self, dp_rank: int) -> Sequence[MicroBatch]:
        """The micro-batches of a data-parallel rank."""
        if not 0 <= self.step < len(self.plan.steps):
            raise DataError(
                f"step={self.step} of a plan of {len(self.plan.steps)} steps; pass one of 0 to "
                f"{len(self.plan.steps) - 1}"
            )
        return self.step_plan.ranks[dp_rank]

    def check(self, head: checks.Head) -> None:
        """Raise a MegapackError if this rank cannot run the call."""
        objective = self.objective
        if objective is not None:
            checks.check_objective(objective, head)
        checks.check_entropy(self.with_entropy, head)
        missing = [name for name in self.field_names if name not in self.batch.field_names]
        if missing:
            raise DataError(f"{type(objective).__name__} reads {missing}; add them to the batch")
        wide = getattr(objective, "wide_fields", ())
        for name in self.field_names:
            if name not in wide and self.batch.is_wide(name):
                raise DataError(
                    f"{type(objective).__name__} reads one number of {name!r} per token, and the "
                    "batch has several; give values of shape [tokens]"
                )
        if objective is not None and hasattr(objective, "check"):
            objective.check(self.batch, self.plan, self.step)

    @functools.cached_property
    def sample_weights(self) -> list[float] | None:
        """The weight of each sample's loss tokens, per sample of the batch; None without a loss."""
        if self.objective is None:
            return None
        weights = sample_weights(
            self.weighting, self.batch.num_loss_tokens, self.plan, self.step, self.norm_constant
        )
        if not np.isfinite(weights).all():
            raise DataError(
                f"weights of {self.weighting} hold a NaN or an infinity; check norm_constant="
                f"{self.norm_constant} and the response masks"
            )
        return list(weights.tolist())


def _described(objective: Objective) -> str:
    """The objective's repr without addresses, which differ between processes."""
    return f"{type(objective).__module__}.{re.sub(r' at 0x[0-9a-f]+', '', repr(objective))}"
