"""Per-token weights and objectives: the loss of a step is the sum of weight * loss over its tokens.

The plan and the response masks fix the weights before the step runs, and an objective returns one
loss per token, never a mean. So the same kept samples give the same gradient with any packing,
padding and layout, and whatever else was dropped.

Shape suffix: R response positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megapack.base.choices import KlKind, LossWeighting
from megapack.errors import ConfigError, DataError, brief
from megapack.loss.correction import ENGINE_LOGPROBS, Correction
from megapack.plan.plan import Plan
from megapack.rows.segments import Segments

TEACHER_LOGPROBS = "teacher_logprobs"
"""Name of a field: the log-prob (nats) of each token under a teacher."""

MAX_LOG_RATIO = 88.0
"""Metrics take larger log-ratios (nats) as this one, whose exp is near the largest fp32 number."""

Fields = Mapping[str, Tensor]
"""An objective's required fields by name, each [R], or [R, k] for wide ones."""
Losses = tuple[Tensor, dict[str, Tensor]]
"""The losses [R] and metrics (name -> [R]) of a micro-batch's response tokens."""
__all__ = ["GRPO", "PPO", "SFT", "LossWeighting", "Objective", "kl_estimate", "sample_weights"]


def sample_weights(
    weighting: LossWeighting,
    num_loss_tokens: Sequence[int],
    plan: Plan,
    step: int = 0,
    norm_constant: float | None = None,
) -> npt.NDArray[np.float64]:
    """The weight of each response token in the step's loss, one number per sample.

        plan = build_dp_schedule(batch.lengths, layout=layout, max_tokens_per_gpu=16384)
        weights = sample_weights("token-mean", batch.num_loss_tokens, plan)

    `ScheduleAdapter.step` computes these itself, from its `weighting`. With n_i response tokens in
    sample i, and S samples and R rollouts with response tokens in the step:

    - `token-mean`: 1 / sum(n), every token counts the same
    - `seq-mean-token-mean`: 1 / (S * n_i), every sample counts the same
    - `seq-mean-token-sum`: 1 / S
    - `seq-mean-token-sum-norm`: 1 / (S * norm_constant), as in Dr. GRPO (arXiv 2503.20783)
    - `rollout-mean`: 1 / (R * tokens of the sample's rollout), every rollout counts the same

    Only the step's kept samples with response tokens are in the denominators: with [0, 4] response
    tokens, the weight under `token-mean` is 1 / 4.

    Args:
        weighting: what the loss is averaged over.
        num_loss_tokens: per sample of the whole batch the response tokens that count in the loss.
        plan: a plan of this batch.
        step: index of the plan's step.
        norm_constant: tokens per sample under "seq-mean-token-sum-norm", above 0.

    Returns:
        fp64 [samples of the batch]; 0 for samples that the step leaves out.

    Raises:
        ConfigError: the weighting is unknown, or the norm constant is missing or not positive.
        DataError: the number of counts is not the number of samples, or the step has no response
            token.
    """
    if weighting not in get_args(LossWeighting):
        raise ConfigError(
            f"unknown loss weighting {brief(weighting)}; set one of "
            f"{', '.join(get_args(LossWeighting))}"
        )
    counts = np.asarray(num_loss_tokens, dtype=np.int64)
    if counts.shape != (plan.num_samples,):
        raise DataError(
            f"{counts.size} token counts for a plan of {plan.num_samples} samples; give one per "
            "sample"
        )
    kept = np.zeros(plan.num_samples, dtype=bool)
    kept[list(plan.steps[step].kept_samples)] = True
    counted = kept & (counts > 0)
    if not counted.any():
        raise DataError(
            f"step {step} has no response token among {int(kept.sum())} samples; give at least one "
            "a response"
        )
    weights = np.zeros(plan.num_samples, dtype=np.float64)
    weights[counted] = 1.0 / _denominators(weighting, counts, counted, plan, norm_constant)
    return weights


def _denominators(
    weighting: LossWeighting,
    counts: npt.NDArray[np.int64],
    counted: npt.NDArray[np.bool_],
    plan: Plan,
    norm_constant: float | None,
) -> npt.NDArray[np.floating[Any]] | float:
    num_samples = float(counted.sum())
    if weighting == "token-mean":
        return float(counts[counted].sum())
    if weighting == "seq-mean-token-mean":
        return num_samples * counts[counted]
    if weighting == "seq-mean-token-sum":
        return num_samples
    if weighting == "seq-mean-token-sum-norm":
        if norm_constant is None or not 0 < norm_constant < math.inf:
            raise ConfigError(
                f"seq-mean-token-sum-norm needs norm_constant > 0, not {norm_constant}; "
                "set it to the longest response in tokens, for example"
            )
        return num_samples * norm_constant
    ids = plan.rollout_ids or tuple(range(plan.num_samples))
    index = {rollout: k for k, rollout in enumerate(dict.fromkeys(ids))}
    rollout_of = np.array([index[rollout] for rollout in ids])[counted]
    tokens = np.bincount(rollout_of, weights=counts[counted])
    return float((tokens > 0).sum()) * tokens[rollout_of]


class Objective(Protocol):
    """The interface of objectives, for a loss of your own: per token, or per sample.

        class Reinforce:
            required_fields = ("advantages",)
            needs_entropy = False

            def __call__(self, logprobs_R, entropy_R, fields):
                return -fields["advantages"] * logprobs_R, {"nll": -logprobs_R}

        adapter.step(plan, batch, objective=Reinforce())

    R is the number of response tokens of a micro-batch. An objective may also have:

    - `needs_segments = True`: it is called with a fourth argument, the row's
      `rows.segments.Segments`.
    - `reads = "values"`: it is called with a value head's fp32 values instead of log-probs.
    - `reads = "topk_logprobs"`: it is called with log-probs [R, 1 + K], of the label and of the K
      ids that the field `teacher_topk_ids` has for it, see `Distillation`.
    - `wide_fields`: the required fields that have several numbers per token. All others have one.
    - `check(batch, plan, step)`: raises DataError for samples that the objective does not accept;
      called on every rank before the step runs.
    """

    @property
    def required_fields(self) -> tuple[str, ...]:
        """Fields of the batch that the objective reads."""

    @property
    def needs_entropy(self) -> bool:
        """Whether the objective needs the entropy of the next-token distribution."""

    def __call__(
        self,
        logprobs_R: Tensor,
        entropy_R: Tensor | None,
        fields: Mapping[str, Tensor],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The losses [R] and metrics (name -> [R]) of a micro-batch's response tokens.

        A step reports a metric's sum with the weights of the loss, or its maximum if the name ends
        with `_max`.

        Args:
            logprobs_R: fp32 log-probs (nats) of the response tokens.
            entropy_R: fp32 entropies (nats) of their distributions; None unless needed or reported.
            fields: the required fields by name, each [R], or [R, k] for wide ones.
        """


AnyObjective = Objective
"""Another name, which users' code may have; ours says `Objective`."""


@dataclass(frozen=True, kw_only=True)
class SFT:
    """The negative log-likelihood of the response: supervised fine-tuning.

        result = adapter.step(plan, batch, objective=SFT())

    A token's loss is -log-prob, in nats. It reads no fields and has no metrics.
    """

    required_fields = ()
    needs_entropy = False

    def __call__(self, logprobs_R: Tensor, entropy_R: Tensor | None, fields: Fields) -> Losses:
        """See `Objective`."""
        return -logprobs_R, {}


@dataclass(frozen=True, kw_only=True)
class PPO:
    """The clipped policy loss of PPO (arXiv 1707.06347), with an entropy bonus.

        batch.set_field("advantages", advantages)  # per sample or per token
        batch.set_field("old_logprobs", adapter.forward(plan, batch)["logprobs"])
        result = adapter.step(plan, batch, objective=PPO(clip_high=0.28))

    With r = exp(log-prob - old log-prob) and advantage A, a token's loss is
    max(-A * r, -A * clip(r, 1 - clip_low, 1 + clip_high)) - entropy_coef * entropy.

    Reads:
        advantages: one number per sample, or one per response token.
        old_logprobs: log-probs (nats) at the batch's start, one per response token.
        rollout_logprobs: with `correction`: the inference engine's log-probs (nats).
        teacher_logprobs: with `teacher_kl_coef`: a teacher's log-probs (nats).

    Metrics: ratio, clip_fraction, kl_old (k3, nats), those of `Correction`, kl_teacher (k1).

    Raises:
        ConfigError: a number out of range.
    """

    clip_low: float = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = 0.2
    """The ratio is clipped above at 1 + clip_high; above clip_low it is DAPO's clip-higher."""
    dual_clip: float | None = None
    """Upper bound of the ratio at negative advantages, above 1 (arXiv 1912.09729). None: none."""
    entropy_coef: float = 0.0
    """Factor of the entropy, which is subtracted from the loss."""
    correction: Correction | None = None
    """Weights of the clipped loss from the log-probs of the engine that sampled; None: no weights.
    Entropy and KL are not weighted."""
    teacher_kl_coef: float = 0.0
    """On-policy distillation: advantages lose this * (old log-prob - teacher's log-prob). That is
    the k1 estimate of KL(policy || teacher). Advantages of 0 leave only the teacher."""

    def __post_init__(self) -> None:
        if not 0 <= self.clip_low <= 1 or not 0 <= self.clip_high < math.inf:
            raise ConfigError(
                f"clip_low={self.clip_low} and clip_high={self.clip_high}; set them in [0, 1] and "
                "to at least 0"
            )
        if self.dual_clip is not None and not 1 < self.dual_clip < math.inf:
            raise ConfigError(f"dual_clip={self.dual_clip}; set it above 1, or to None")
        _check_finite("entropy_coef", self.entropy_coef)
        _check_finite("teacher_kl_coef", self.teacher_kl_coef)

    @property
    def required_fields(self) -> tuple[str, ...]:
        """See `Objective`."""
        more = [ENGINE_LOGPROBS] if self.correction is not None else []
        more += [TEACHER_LOGPROBS] if self.teacher_kl_coef else []
        return ("advantages", "old_logprobs", *more)

    @property
    def needs_entropy(self) -> bool:
        """See `Objective`."""
        return self.entropy_coef != 0

    @property
    def needs_segments(self) -> bool:
        """See `Objective`."""
        return self.correction is not None

    def __call__(
        self,
        logprobs_R: Tensor,
        entropy_R: Tensor | None,
        fields: Fields,
        segments: Segments | None = None,
    ) -> Losses:
        """See `Objective`; metrics: ratio, clip_fraction, kl_old (k3), those of `Correction`, and
        kl_teacher (k1)."""
        # All in fp64, whose exp ends at e^709.
        log_ratio_R = self._log_ratio(logprobs_R.double(), fields["old_logprobs"], segments)
        advantages_R = fields["advantages"].double()
        more = {}
        if self.teacher_kl_coef:
            more["kl_teacher"] = fields["old_logprobs"] - fields[TEACHER_LOGPROBS]
            advantages_R = advantages_R - self.teacher_kl_coef * more["kl_teacher"]
        is_bounded_R = advantages_R >= 0
        weights_R = None
        if self.correction is not None:
            assert segments is not None
            weights_R, of_engine = self.correction.weights(fields, segments)
            more |= of_engine
            # What has no weight needs no value.
            is_bounded_R = is_bounded_R | (weights_R == 0)
        low, high = 1 - self.clip_low, 1 + self.clip_high
        # A ratio above the clip counts only where the advantage is negative, one below it only
        # where it is not.
        least_R = torch.where(advantages_R < 0, low, 0.0).double()
        most_R = torch.where(is_bounded_R, high, self.dual_clip or math.inf).double()
        loss_R = -advantages_R * clipped_exp(log_ratio_R, least_R, most_R)
        if weights_R is not None:
            loss_R = weights_R * loss_R
        ratio_R = log_ratio_R.detach().clamp(max=MAX_LOG_RATIO).exp()
        metrics = {
            "ratio": ratio_R,
            "clip_fraction": (ratio_R != ratio_R.clamp(low, high)).float(),
            "kl_old": ratio_R - 1 - log_ratio_R.detach(),
            **more,
        }
        if self.entropy_coef and entropy_R is not None:
            loss_R = loss_R - self.entropy_coef * entropy_R
        return loss_R.to(logprobs_R.dtype), metrics

    def _log_ratio(self, exact_R: Tensor, old_R: Tensor, segments: Segments | None) -> Tensor:
        return exact_R - old_R


@dataclass(frozen=True, kw_only=True)
class GRPO(PPO):
    """The policy loss of GRPO (arXiv 2402.03300): PPO's, plus a KL penalty to a reference policy.

        batch = SampleBatch.from_prompt_response(prompts, responses, {"advantages": advantages})
        batch.set_field("old_logprobs", adapter.forward(plan, batch)["logprobs"])
        result = adapter.step(plan, batch, objective=GRPO(clip_high=0.28))

    Reads:
        advantages, old_logprobs: as `PPO`; `group_advantages` makes advantages from rewards.
        ref_logprobs: with `kl_coef`: the reference's log-probs (nats), one per response token.

    Metrics: those of `PPO`, and kl_ref (nats).

    Raises:
        ConfigError: a number out of range, or an unknown estimator.
    """

    kl_coef: float = 0.0
    """Factor of the KL estimate, which is added to the loss."""
    kl_kind: KlKind = "k3"
    """Estimator: k1 = x, k2 = x^2 / 2, k3 = exp(-x) - 1 + x, with x = log-prob - reference.
    See joschu.net/blog/kl-approx.html."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kl_kind not in get_args(KlKind):
            raise ConfigError(f"unknown kl_kind {self.kl_kind!r}; set one of k1, k2, k3")
        _check_finite("kl_coef", self.kl_coef)

    @property
    def required_fields(self) -> tuple[str, ...]:
        """See `Objective`."""
        return (*super().required_fields, *(("ref_logprobs",) if self.kl_coef else ()))

    def __call__(
        self,
        logprobs_R: Tensor,
        entropy_R: Tensor | None,
        fields: Fields,
        segments: Segments | None = None,
    ) -> Losses:
        """See `Objective`; metrics of PPO, and kl_ref."""
        loss_R, metrics = super().__call__(logprobs_R, entropy_R, fields, segments)
        if self.kl_coef:
            kl_R = self._kl(logprobs_R.double(), fields["ref_logprobs"], segments)
            metrics["kl_ref"] = kl_R
            loss_R = loss_R + (self.kl_coef * kl_R).to(loss_R.dtype)
        return loss_R, metrics

    def _kl(self, exact_R: Tensor, reference_R: Tensor, segments: Segments | None) -> Tensor:
        return kl_estimate(exact_R, reference_R, self.kl_kind)


def _check_finite(name: str, value: float) -> None:
    if not math.isfinite(value):
        raise ConfigError(f"{name}={value}; set a finite number")


def clipped_exp(log_R: Tensor, least_R: Tensor, most_R: Tensor) -> Tensor:
    """exp(log_R) clipped to [least_R, most_R], with a gradient of 0 where it is clipped.

    The exponent is limited first, a little above the bound: an infinity that is clipped afterwards
    has a gradient of 0 times infinity, a NaN. Where `most_R` is infinite, so may be the result.
    """
    return torch.minimum(log_R, most_R.log() + 1).exp().clamp(least_R, most_R)


def kl_estimate(logprobs_R: Tensor, reference_R: Tensor, kind: str) -> Tensor:
    """Per-token estimate of KL(policy || reference) in nats, from log-probs of sampled tokens."""
    diff_R = logprobs_R - reference_R
    if kind == "k1":
        return diff_R
    if kind == "k2":
        return diff_R.square() / 2
    return (-diff_R).exp() - 1 + diff_R
