"""What a step is called with: what all ranks must agree on, and what packing needs of it."""

from __future__ import annotations

import functools
import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from megapack import settings
from megapack.errors import DataError
from megapack.loss import LossWeighting, sample_weights
from megapack.objectives import AnyObjective
from megapack.outputs import Scope
from megapack.plan import MicroBatch, Plan
from megapack.samples import SampleBatch


@dataclass(frozen=True, kw_only=True)
class StepCall(ABC):
    """One call of the adapter."""

    plan: Plan
    batch: SampleBatch
    step: int
    revision: int
    """Of the batch when it was called."""
    routing: Sequence[Tensor | None] | None

    @property
    @abstractmethod
    def text(self) -> str:
        """The call in words, the same on every rank."""

    @property
    def field_names(self) -> Sequence[str]:
        """Fields that rows carry."""
        return ()

    @property
    def records_routing(self) -> bool:
        """Whether the experts that were taken are kept."""
        return False

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for a call that packs and agrees on the same."""
        routing = None if self.routing is None else id(self.routing)
        return id(self.plan), id(self.batch), self.revision, self.step, self.text, routing

    def same(self) -> Mapping[str, str]:
        """What must be equal on all ranks, by name; the first that differs is the one told."""
        plan, batch = self.plan, self.batch
        known = 0 <= self.step < len(plan.steps)
        ranks = plan.steps[self.step].ranks if known else ()
        row_tokens = [[microbatch.row_tokens for microbatch in rank] for rank in ranks]
        return {
            "plan": plan.digest(),
            "step number": str(self.step),
            "M": str([len(rank) for rank in ranks]),
            "row lengths": _digest(row_tokens),
            "field names": ", ".join(sorted(batch.field_names)),
            "call": self.text,
            "counts of loss tokens": hashlib.sha256(
                repr(batch.num_loss_tokens).encode()
            ).hexdigest(),
            "tensor fields": batch.tensor_signature,
        }

    def rows(self, dp_rank: int) -> Sequence[MicroBatch]:
        """The micro-batches of a data-parallel rank."""
        if not 0 <= self.step < len(self.plan.steps):
            raise DataError(
                f"step={self.step} of a plan of {len(self.plan.steps)} steps; pass one of 0 to "
                f"{len(self.plan.steps) - 1}"
            )
        return self.plan.steps[self.step].ranks[dp_rank]

    @abstractmethod
    def check(self, head: settings.Head) -> None:
        """Raise a MegapackError where this rank could not run the call."""

    @property
    def sample_weights(self) -> list[float] | None:
        """Per sample of the batch what each of its loss tokens weighs; None without a loss."""
        return None


@dataclass(frozen=True, kw_only=True)
class TrainingCall(StepCall):
    """Of `ScheduleAdapter.step`."""

    objective: AnyObjective
    weighting: LossWeighting
    norm_constant: float | None
    entropy: bool

    @property
    def with_entropy(self) -> bool:
        """Whether the entropy is computed."""
        return self.entropy or self.objective.needs_entropy

    @property
    def field_names(self) -> Sequence[str]:
        return self.objective.required_fields

    @property
    def text(self) -> str:
        objective = _described(self.objective)
        replays = self.routing is not None
        return f"train {self.weighting} {self.norm_constant} {self.entropy} {replays} {objective}"

    def check(self, head: settings.Head) -> None:
        settings.check_objective(self.objective, head)
        settings.check_entropy(self.with_entropy, head)
        missing = [n for n in self.objective.required_fields if n not in self.batch.field_names]
        if missing:
            name = type(self.objective).__name__
            raise DataError(f"{name} reads {missing}; add them to the batch")
        if hasattr(self.objective, "check"):
            self.objective.check(self.batch, self.plan, self.step)

    @functools.cached_property
    def sample_weights(self) -> list[float]:
        weights = sample_weights(
            self.weighting,
            self.batch.num_loss_tokens,
            self.plan,
            self.step,
            self.norm_constant,
        )
        if not np.isfinite(weights).all():
            raise DataError(
                f"weights of {self.weighting} hold a NaN or an infinity; look at norm_constant="
                f"{self.norm_constant} and the response masks"
            )
        return list(weights.tolist())


@dataclass(frozen=True, kw_only=True)
class ForwardCall(StepCall):
    """Of `ScheduleAdapter.forward`."""

    entropy: bool
    scope: Scope
    record_routing: bool

    @property
    def records_routing(self) -> bool:
        return self.record_routing

    @property
    def text(self) -> str:
        replays = self.routing is not None
        return f"forward {self.entropy} {self.scope} {replays} {self.record_routing}"

    def check(self, head: settings.Head) -> None:
        settings.check_entropy(self.entropy, head)


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def _described(objective: AnyObjective) -> str:
    """The same text on every rank: addresses in it differ between processes."""
    return f"{type(objective).__module__}.{re.sub(r' at 0x[0-9a-f]+', '', repr(objective))}"
