"""The config's section `objective`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from megapack.base.choices import (
    AdvantageNorm,
    CorrectionKind,
    KlKind,
    KlLevel,
    LossWeighting,
    RatioLevel,
    Tail,
)
from megapack.config.bounds import at_least, without_effect
from megapack.errors import ConfigError

_POLICY = ("ppo", "grpo", "gspo")
# Keys, and the kinds under which they have an effect.
_KINDS: Mapping[str, tuple[str, ...]] = {
    "kl_level": ("gspo",),
    "kl_coef": ("grpo", "gspo"),
    "correction": _POLICY,
    "teacher_kl_coef": _POLICY,
    **dict.fromkeys(("distill_reverse_weight", "distill_tail", "distill_sft_coef"), ("distill",)),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """The loss, and how tokens are weighted in it."""

    kind: Literal["sft", "ppo", "grpo", "gspo", "dpo", "reward", "distill"] = "grpo"
    """sft: negative log-likelihood. ppo: the clipped policy loss. grpo: the same with a KL penalty
    in the loss. gspo: the same with one ratio per sample (set seq-mean-token-mean, and clips near
    3e-4). dpo: direct preference optimization of pairs, against a reference policy. reward: a
    reward model, trained on pairs; a value head replaces the vocabulary's projection. Both need
    seq-mean-token-mean, which makes their loss the mean over pairs. distill: the KL from a teacher,
    whose most likely ids the data has."""
    loss_weighting: LossWeighting = "token-mean"
    """The weight of a response token in a step's loss, see `megapack.loss`."""
    norm_constant: float | None = None
    """The divisor of seq-mean-token-sum-norm, in tokens; null for the other weightings."""
    clip_low: float = 0.2
    """The probability ratio is clipped below at 1 - clip_low; in [0, 1]."""
    clip_high: float = 0.2
    """The ratio is clipped above at 1 + clip_high."""
    dual_clip: float | None = None
    """Bound on the loss of tokens with negative advantages, above 1; null = no bound."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference policy; 0 = no reference pass."""
    reference_hf_path: str | None = None
    """A folder of a Hugging Face model of the policy's sizes whose weights the reference policy
    has, for `kl_coef`, `kl_in_reward_coef` and dpo; null = the policy's initial weights."""
    kl_kind: KlKind = "k3"
    """The estimator of the KL."""
    kl_level: KlLevel = "token"
    """For gspo: apply the estimator to each token's log-ratio, or to the mean over a sample."""
    entropy_coef: float = 0.0
    """Weight of the entropy, which is subtracted from the loss; 0 = entropy is only reported."""
    advantage_norm: AdvantageNorm = "group"
    """How rewards become advantages without a critic, see
    `megapack.job.data.advantages.group_advantages`."""
    gamma: float = 1.0
    """With a critic: the factor of a reward one token later, in [0, 1]."""
    gae_lambda: float = 1.0
    """With a critic: lambda of GAE (arXiv 1506.02438), in [0, 1]. 1 uses rewards alone, less relies
    on the critic's values instead."""
    kl_in_reward_coef: float = 0.0
    """With a critic: weight of the log-ratio to the reference policy that is
    subtracted from each token's reward, as in InstructGPT; 0 = no reference pass."""
    max_response_tokens: int | None = None
    """The longest response that the rollouts could have, in tokens; null = not known. Only
    `overlong_buffer_tokens` uses it."""
    overlong_buffer_tokens: int | None = None
    """Rewards fall linearly over this many tokens before `max_response_tokens`: DAPO's penalty of
    overlong responses, see `megapack.job.data.advantages.penalize_overlong`. null = no penalty. Not
    with data.overlong=truncate, which would hide the lengths."""
    overlong_penalty: float = 1.0
    """What the reward of a response of `max_response_tokens` or more loses. Needs
    `overlong_buffer_tokens`."""
    dpo_beta: float = 0.1
    """For dpo: factor of the log-ratio between policy and reference, above 0."""
    dpo_label_smoothing: float = 0.0
    """For dpo: assumed share of pairs whose label is wrong, in [0, 0.5)."""
    correction: CorrectionKind | None = None
    """For ppo, grpo and gspo: weigh each token's policy loss by the importance ratio of the
    trainer's old log-probs to the engine's, the column rollout_logprobs. truncate: the ratio is cut
    to the bounds. mask: it is 0 outside of them. null = no weights."""
    correction_level: RatioLevel = "token"
    """What is compared with the bounds: the ratio of a token, of a sequence (the product), or its
    geometric mean."""
    correction_low: float = 0.0
    """Lower bound of the ratio."""
    correction_high: float = 2.0
    """Upper bound of the ratio."""
    correction_weight_level: RatioLevel | None = None
    """For mask: the ratio that is the weight of what is kept; null = that of `correction_level`."""
    teacher_kl_coef: float = 0.0
    """For ppo, grpo and gspo: on-policy distillation. Each token's advantage loses this times old
    log-prob - the column teacher_logprobs. Without rewards in the data, it starts at 0."""
    distill_reverse_weight: float = 0.0
    """For distill: share of the reverse KL in the loss, in [0, 1]; 0 is forward, 1 is reverse."""
    distill_tail: Tail = "lump"
    """For distill: what happens to ids that are not among the teacher's k most likely. lump: they
    count as one id. ignore: they are left out. renormalize: the k probabilities are divided by
    their sum."""
    distill_sft_coef: float = 0.0
    """For distill: factor of the negative log-likelihood that is added to the loss."""
    logprob_chunk_tokens: int | None = None
    """Tokens whose logits are in memory at once in the vocabulary head; fewer save memory. null =
    a power of two of at most 8,192 whose fp32 logits fit into 2.5 GiB on a GPU: 4,096 for 151,936
    vocabulary rows at tp=1."""

    def __post_init__(self) -> None:
        at_least(self, "objective", 0, "clip_high", "kl_coef", "kl_in_reward_coef")
        at_least(self, "objective", 1, "logprob_chunk_tokens")
        at_least(self, "objective", 0, "teacher_kl_coef", "distill_sft_coef")
        for name in ("gamma", "gae_lambda", "clip_low", "distill_reverse_weight"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"objective.{name} is {getattr(self, name)}; set it in [0, 1]")
        if not self.has_reference:
            needed = f"under kind={self.kind} without kl_coef or kl_in_reward_coef; set one"
            without_effect(self, "objective", needed, "reference_hf_path")
        self._check_overlong()
        self._check_pairs()
        self._check_correction()
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ConfigError(f"objective.dual_clip is {self.dual_clip}; set above 1, or null")
        normed = self.loss_weighting == "seq-mean-token-sum-norm"
        if normed and (self.norm_constant is None or self.norm_constant <= 0):
            raise ConfigError(
                f"objective.loss_weighting={self.loss_weighting} with norm_constant="
                f"{self.norm_constant}; set objective.norm_constant above 0"
            )
        for name, kinds in _KINDS.items():
            if self.kind not in kinds:
                needed = f"under kind={self.kind}; set objective.kind={' or '.join(kinds)}"
                without_effect(self, "objective", needed, name)

    def _check_pairs(self) -> None:
        if not 0 < self.dpo_beta < float("inf") or not 0 <= self.dpo_label_smoothing < 0.5:
            raise ConfigError(
                f"objective.dpo_beta={self.dpo_beta} and objective.dpo_label_smoothing="
                f"{self.dpo_label_smoothing}; set them above 0 and in [0, 0.5)"
            )
        if self.reads_pairs and self.loss_weighting != "seq-mean-token-mean":
            raise ConfigError(
                f"objective.loss_weighting={self.loss_weighting} would weight pairs by their "
                f"tokens under kind={self.kind}; set objective.loss_weighting=seq-mean-token-mean"
            )

    def _check_correction(self) -> None:
        if not 0 <= self.correction_low < self.correction_high < float("inf"):
            raise ConfigError(
                f"objective.correction_low={self.correction_low} and objective.correction_high="
                f"{self.correction_high}; set 0 <= low < high"
            )
        if self.correction is None:
            names = ("correction_level", "correction_low", "correction_high")
            needed = "without objective.correction; set it"
            without_effect(self, "objective", needed, *names, "correction_weight_level")
        elif self.correction != "mask":
            needed = f"under correction={self.correction}; set correction=mask"
            without_effect(self, "objective", needed, "correction_weight_level")

    @property
    def token_columns(self) -> tuple[str, ...]:
        """Columns of the data that the loss reads; `megapack.job.data.rollouts` describes them."""
        return (
            *(("rollout_logprobs",) if self.correction is not None else ()),
            *(("teacher_logprobs",) if self.teacher_kl_coef else ()),
            *(("teacher_topk_ids", "teacher_topk_logprobs") if self.kind == "distill" else ()),
        )

    @property
    def reads_pairs(self) -> bool:
        """Whether the loss is of pairs of a preferred and another response."""
        return self.kind in ("dpo", "reward")

    @property
    def has_value_head(self) -> bool:
        """Whether the trained model gives one number per token in place of log-probs."""
        return self.kind == "reward"

    @property
    def has_reference(self) -> bool:
        """Whether log-probs of a reference policy are needed."""
        return bool(self.kl_coef or self.kl_in_reward_coef) or self.kind == "dpo"

    @property
    def num_logprob_passes(self) -> int:
        """Passes over a batch before its steps: with its first weights, and with the reference."""
        return int(self.reads_rewards) + int(self.has_reference)

    @property
    def reads_rewards(self) -> bool:
        """Whether the loss needs rewards or advantages of samples."""
        return self.kind in _POLICY

    def _check_overlong(self) -> None:
        at_least(self, "objective", 1, "max_response_tokens", "overlong_buffer_tokens")
        at_least(self, "objective", 0, "overlong_penalty")
        if self.overlong_buffer_tokens is None:
            needed = "without objective.overlong_buffer_tokens; set it"
            without_effect(self, "objective", needed, "overlong_penalty")
            return
        longest = self.max_response_tokens
        if longest is None or self.overlong_buffer_tokens > longest:
            raise ConfigError(
                f"objective.overlong_buffer_tokens={self.overlong_buffer_tokens} with objective."
                f"max_response_tokens={longest}; set max_response_tokens to the limit that the "
                "rollouts had, and a buffer of at most that"
            )
