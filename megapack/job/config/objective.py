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
    """sft: negative log-likelihood. ppo: the clipped policy loss. grpo: with a KL penalty. gspo:
    with one ratio per sample (set both clips near `3e-4`). dpo and reward (a reward model with a
    value head) read pairs, distill a teacher's top ids. dpo and reward need seq-mean-token-mean,
    which suits gspo too."""
    loss_weighting: LossWeighting = "token-mean"
    """The weight of a response token in a step's loss."""
    norm_constant: float | None = None
    """Divisor of seq-mean-token-sum-norm, in tokens."""
    clip_low: float = 0.2
    """The probability ratio is clipped below at 1 - clip_low."""
    clip_high: float = 0.2
    """The ratio is clipped above at 1 + clip_high."""
    dual_clip: float | None = None
    """Bound on the loss of tokens with negative advantages, above 1."""
    kl_coef: float = 0.0
    """grpo and gspo: weight of the KL to the reference policy; 0 = no reference pass."""
    reference_hf_path: str | None = None
    """A folder with the reference policy's weights; null = the initial weights."""
    kl_kind: KlKind = "k3"
    """The estimator of the KL."""
    kl_level: KlLevel = "token"
    """gspo: estimate each token's KL, or that of a sample's mean log-ratio."""
    entropy_coef: float = 0.0
    """Weight of the entropy, which is subtracted from the loss."""
    advantage_norm: AdvantageNorm = "group"
    """How rewards become advantages without a critic. GRPO's paper: group-std."""
    gamma: float = 1.0
    """Critic: the factor of a reward one token later, in [0, 1]."""
    gae_lambda: float = 1.0
    """Critic: lambda of GAE, in [0, 1]."""
    kl_in_reward_coef: float = 0.0
    """Critic: weight of the log-ratio to the reference that each token's reward loses; 0 = no
    reference pass."""
    max_response_tokens: int | None = None
    """The longest response that the rollouts could have."""
    overlong_buffer_tokens: int | None = None
    """Tokens before `max_response_tokens` over which rewards fall (DAPO's overlong penalty). Not
    with data.overlong=truncate."""
    overlong_penalty: float = 1.0
    """What a response of `max_response_tokens` loses."""
    dpo_beta: float = 0.1
    """dpo: factor of the log-ratio between policy and reference."""
    dpo_label_smoothing: float = 0.0
    """dpo: assumed share of wrong labels, in `[0, 0.5)`."""
    correction: CorrectionKind | None = None
    """ppo, grpo, gspo: weigh tokens by the ratio of old log-probs to the engine's (column
    rollout_logprobs), cut to the bounds or 0 outside."""
    correction_level: RatioLevel = "token"
    """What is compared with the bounds: a token's ratio, a sequence's product, or its geometric
    mean."""
    correction_low: float = 0.0
    """Lower bound of the ratio."""
    correction_high: float = 2.0
    """Upper bound of the ratio."""
    correction_weight_level: RatioLevel | None = None
    """mask: the ratio that weighs what is kept; null = `correction_level`."""
    teacher_kl_coef: float = 0.0
    """ppo, grpo, gspo: advantages lose this times old log-prob - teacher_logprobs (on-policy
    distillation)."""
    distill_reverse_weight: float = 0.0
    """distill: share of the reverse KL in the loss, in [0, 1]."""
    distill_tail: Tail = "lump"
    """distill: ids outside the teacher's top k count as one, are left out, or the k are
    renormalized."""
    distill_sft_coef: float = 0.0
    """distill: weight of the negative log-likelihood that is added."""
    logprob_chunk_tokens: int | None = None
    """Tokens whose logits are in memory at once; null = by the vocabulary's size."""

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
