"""Objectives of whole samples and of value heads; `loss.token` has the per-token objectives.

The loss of a sample is repeated at each of its response tokens. With the weighting
`seq-mean-token-mean` the step's loss is then the mean over samples, as in the papers.

Shape suffixes: R response positions, n samples of the row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megapack.base.choices import KlLevel
from megapack.errors import ConfigError
from megapack.loss.distillation import TOPK_LOGPROBS
from megapack.loss.token import GRPO, Fields, Losses, Objective, kl_estimate
from megapack.rows.segments import Segments, no_segments


@dataclass(frozen=True, kw_only=True)
class GSPO(GRPO):
    """The loss of GSPO (arXiv 2507.18071): GRPO's, with one clipped ratio per sample.

        result = adapter.step(
            plan, batch, objective=GSPO(), weighting="seq-mean-token-mean"
        )

    The ratio is the geometric mean of its tokens' ratios: exp(mean(log-prob - old log-prob)).
    Reads the fields of `GRPO` and has its metrics, with ratio and kl_old per sample.

    Raises:
        ConfigError: a number out of range, or an unknown choice.
    """

    clip_low: float = 3e-4
    """As in PPO, but smaller: the mean over a sample varies less than one token's ratio."""
    clip_high: float = 4e-4
    """As in PPO."""
    token_level: bool = False
    """GSPO-token: each token has its own gradient and advantage, and the sample's ratio. The
    gradient is that of GSPO if all tokens of a sample have the same advantage."""
    kl_level: KlLevel = "token"
    """The KL penalty is estimated per "token", or from the "sequence"'s mean log-ratio."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kl_level not in ("token", "sequence"):
            raise ConfigError(f"unknown kl_level {self.kl_level!r}; set one of token, sequence")

    @property
    def needs_segments(self) -> bool:
        """See `Objective`."""
        return True

    def _log_ratio(self, exact_R: Tensor, old_R: Tensor, segments: Segments | None) -> Tensor:
        assert segments is not None
        log_ratio_R = segments.spread(segments.mean(exact_R - old_R))
        if self.token_level:
            return log_ratio_R.detach() + exact_R - exact_R.detach()
        return log_ratio_R

    def _kl(self, exact_R: Tensor, reference_R: Tensor, segments: Segments | None) -> Tensor:
        if self.kl_level == "token":
            return super()._kl(exact_R, reference_R, segments)
        assert segments is not None
        mean_n = segments.mean(exact_R - reference_R)
        return segments.spread(kl_estimate(mean_n, torch.zeros_like(mean_n), self.kl_kind))


@dataclass(frozen=True, kw_only=True)
class ValueLoss:
    """The value loss of a PPO critic: half the squared error to the return.

        critic = ScheduleAdapter(critic_chunks, layout=layout, head="value")
        batch.set_field("old_values", critic.forward(plan, batch)["values"])
        result = critic.step(plan, batch, objective=ValueLoss(clip=0.2))

    Reads:
        returns: one number per response token, in the unit of the rewards.
        old_values: with `clip`: the values before the update, one per response token.

    Metrics: value, and with `clip` value_clip_fraction.

    Raises:
        ConfigError: `clip` is not above 0.
    """

    reads = "values"
    needs_entropy = False

    clip: float | None = None
    """Values are clipped to old_values -+ clip, and the larger loss counts; None: no clipping."""

    def __post_init__(self) -> None:
        if self.clip is not None and not self.clip > 0:
            raise ConfigError(f"clip={self.clip}; set it above 0, or to None")

    @property
    def required_fields(self) -> tuple[str, ...]:
        """See `Objective`."""
        return ("returns",) if self.clip is None else ("returns", "old_values")

    def __call__(self, values_R: Tensor, entropy_R: Tensor | None, fields: Fields) -> Losses:
        """See `Objective`; metrics: value, and value_clip_fraction if `clip` is set."""
        metrics = {"value": values_R}
        dtype = values_R.dtype
        values_R, returns_R = values_R.double(), fields["returns"]
        error_R = (values_R - returns_R).square()
        if self.clip is not None:
            old_R = fields["old_values"]
            clipped_R = old_R + (values_R - old_R).clamp(-self.clip, self.clip)
            clipped_error_R = (clipped_R - returns_R).square()
            # Rounding in old + (new - old) also changes values; that is not clipping.
            outside_R = (values_R - old_R).abs() > self.clip
            metrics["value_clip_fraction"] = (outside_R & (clipped_error_R > error_R)).float()
            error_R = torch.maximum(error_R, clipped_error_R)
        return (error_R / 2).to(dtype), metrics


def call_objective(
    objective: Objective,
    values_R: Tensor,
    entropy_R: Tensor | None,
    fields: Fields,
    segments: Segments,
) -> Losses:
    """Call an objective, with the segments if it needs them; its losses and metrics."""
    more: tuple[Any, ...] = (segments,) if getattr(objective, "needs_segments", False) else ()
    return objective(values_R, entropy_R, fields, *more)


def reads_topk(objective: Objective | None) -> bool:
    """Whether an objective is called with the log-probs of a teacher's ids."""
    return getattr(objective, "reads", None) == TOPK_LOGPROBS


def metric_names(objective: Objective, with_entropy: bool) -> list[str]:
    """Names of an objective's sums, the same on every rank, from a call without tokens."""
    empty = torch.zeros(0)
    fields = dict.fromkeys(objective.required_fields, empty)
    entropy_R = empty if with_entropy else None
    segments = no_segments(objective.required_fields)
    values_R = torch.zeros(0, 2) if reads_topk(objective) else empty
    _, metrics = call_objective(objective, values_R, entropy_R, fields, segments)
    return ["loss", *sorted({*metrics, *(["entropy"] if with_entropy else [])})]
