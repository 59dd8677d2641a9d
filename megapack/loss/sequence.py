"""Objectives that see whole samples, and those of value heads. `loss` has the per-token ones.

A loss of a whole sample stands at each of its response tokens. Under the weighting
`seq-mean-token-mean` these add up to the mean over samples, which is how the papers write them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from megapack.base.choices import KlLevel
from megapack.errors import ConfigError
from megapack.loss.token import GRPO, Objective, kl_estimate
from megapack.rows.segments import Segments, no_segments


class SequenceObjective(Protocol):
    """An `Objective` that also sees the samples that its positions belong to."""

    @property
    def required_fields(self) -> tuple[str, ...]:
        """See `Objective`."""
        ...

    @property
    def needs_entropy(self) -> bool:
        """See `Objective`."""
        ...

    @property
    def needs_segments(self) -> Literal[True]:
        """What tells it from an `Objective`."""
        ...

    def __call__(
        self,
        logprobs_R: Tensor,
        entropy_R: Tensor | None,
        fields: Mapping[str, Tensor],
        segments: Segments,
        /,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See `Objective`."""
        ...


AnyObjective = Objective | SequenceObjective


@dataclass(frozen=True, kw_only=True)
class GSPO(GRPO):
    """Group sequence policy optimization (arXiv 2507.18071): one clipped ratio per sample.

    The ratio is the geometric mean of its tokens' ratios, exp(mean(log-prob - old)). Reads what
    GRPO reads.
    """

    needs_segments: ClassVar[Literal[True]] = True

    clip_low: float = 3e-4
    """As in PPO; a mean over tokens moves far less than a token's ratio."""
    clip_high: float = 4e-4
    """As in PPO."""
    token_level: bool = False
    """GSPO-token: each token has its own gradient and advantage, and its sample's ratio. Where a
    sample has one advantage this is the same."""
    kl_level: KlLevel = "token"
    """The KL penalty's estimator is taken of each token's log-ratio to the reference, or of their
    mean over the sample."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kl_level not in ("token", "sequence"):
            raise ConfigError(f"unknown kl_level {self.kl_level!r}; set one of token, sequence")

    def __call__(  # type: ignore[override]
        self,
        logprobs_R: Tensor,
        entropy_R: Tensor | None,
        fields: Mapping[str, Tensor],
        segments: Segments,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See `Objective`; metrics of GRPO, ratio and kl_old being those of samples."""
        log_ratio_n = segments.mean(logprobs_R - fields["old_logprobs"])
        log_ratio_R = segments.spread(log_ratio_n)
        if self.token_level:
            log_ratio_R = log_ratio_R.detach() + logprobs_R - logprobs_R.detach()
        loss_R, metrics = self._clipped(log_ratio_R, fields["advantages"], entropy_R)
        if self.kl_coef:
            kl_R = self._kl(logprobs_R, fields["ref_logprobs"], segments)
            metrics["kl_ref"] = kl_R
            loss_R = loss_R + self.kl_coef * kl_R
        return loss_R, metrics

    def _kl(self, logprobs_R: Tensor, reference_R: Tensor, segments: Segments) -> Tensor:
        if self.kl_level == "token":
            return kl_estimate(logprobs_R, reference_R, self.kl_kind)
        mean_n = segments.mean(logprobs_R - reference_R)
        return segments.spread(kl_estimate(mean_n, torch.zeros_like(mean_n), self.kl_kind))


@dataclass(frozen=True, kw_only=True)
class ValueLoss:
    """The clipped value loss of a PPO critic: half the squared error to the return.

    Reads `returns` and, where it clips, `old_values`: the values that `ScheduleAdapter.forward`
    gave before the update.
    """

    reads = "values"
    needs_entropy = False

    clip: float | None = None
    """Values are clipped to old_values -+ clip and the larger loss counts; None: no clipping."""

    def __post_init__(self) -> None:
        if self.clip is not None and not self.clip > 0:
            raise ConfigError(f"clip={self.clip}; set it above 0, or to None")

    @property
    def required_fields(self) -> tuple[str, ...]:
        """See `Objective`."""
        return ("returns",) if self.clip is None else ("returns", "old_values")

    def __call__(
        self, values_R: Tensor, entropy_R: Tensor | None, fields: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See `Objective`; metrics: value, value_clip_fraction where it clips."""
        returns_R, metrics = fields["returns"], {"value": values_R}
        error_R = (values_R - returns_R).square()
        if self.clip is not None:
            old_R = fields["old_values"]
            clipped_R = old_R + (values_R - old_R).clamp(-self.clip, self.clip)
            clipped_error_R = (clipped_R - returns_R).square()
            # Not where rounding alone makes the clipped value another one.
            outside_R = (values_R - old_R).abs() > self.clip
            metrics["value_clip_fraction"] = (outside_R & (clipped_error_R > error_R)).float()
            error_R = torch.maximum(error_R, clipped_error_R)
        return error_R / 2, metrics


def call_objective(
    objective: AnyObjective,
    values_R: Tensor,
    entropy_R: Tensor | None,
    fields: Mapping[str, Tensor],
    segments: Segments,
) -> tuple[Tensor, dict[str, Tensor]]:
    """An objective's losses and metrics, with the segments where it asks for them."""
    more: tuple[Any, ...] = (segments,) if getattr(objective, "needs_segments", False) else ()
    return objective(values_R, entropy_R, fields, *more)


def metric_names(objective: AnyObjective, with_entropy: bool) -> list[str]:
    """Names of an objective's sums, from a call with no tokens; the same on every rank."""
    empty = torch.zeros(0)
    fields = dict.fromkeys(objective.required_fields, empty)
    entropy_R = empty if with_entropy else None
    _, metrics = call_objective(objective, empty, entropy_R, fields, no_segments())
    return ["loss", *sorted({*metrics, *(["entropy"] if with_entropy else [])})]
