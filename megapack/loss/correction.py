"""Importance correction: what an inference engine's log-probs say of the trainer's.

Rollouts are sampled by an engine whose probabilities differ from the trainer's: other kernels, FP8
or INT8 weights, other experts. Policy losses that take the trainer's log-probs at the batch's start
for those of the sampling policy are biased by that. The correction weights each token's policy loss
with a bounded ratio of the two:

    ratio of a token      exp(old log-prob - engine's log-prob)
    ... of a sequence     the product over the sample's loss tokens
    ... geometric         its geometric mean

Truncated importance sampling (TIS) cuts the ratio to [low, high]; masked importance sampling (MIS,
IcePop) takes it unchanged inside of the bounds and 0 outside. Weights have no gradient, and the
loss keeps its denominators: a masked token counts as a token with a loss of 0.

Shape suffixes: R response positions, n samples of the row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from torch import Tensor

from megapack.base.choices import CorrectionKind, RatioLevel
from megapack.errors import ConfigError
from megapack.rows.segments import Segments

ENGINE_LOGPROBS = "rollout_logprobs"
"""Name of a field: the log-prob (nats) that the inference engine gave each token it sampled."""

# e^20 = 5e8: far outside of any bound, and far from where fp32 overflows.
_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Importance correction of policy losses, where the sampling engine differs from the trainer.

        batch.set_field("rollout_logprobs", engine_logprobs)
        objective = GRPO(correction=Correction(kind="truncate", level="token", high=2.0))

    Each token's clipped loss is multiplied by a bounded ratio without a gradient. `docs/losses.md`
    says what NeMo-RL, slime, miles and verl call each combination.

    Reads:
        rollout_logprobs: the engine's log-probs (nats), one per response token.

    Metrics: engine_ratio, engine_ratio_max, engine_clip_fraction, kl_engine (k3, nats).

    Raises:
        ConfigError: an unknown choice, or bounds out of order.
    """

    kind: CorrectionKind = "truncate"
    """Ratios outside [low, high] are cut to it ("truncate") or become 0 ("mask")."""
    level: RatioLevel = "token"
    """The ratio of each token, its product over the sample, or its geometric mean."""
    low: float = 0.0
    """Lower bound of the ratio."""
    high: float = 2.0
    """Upper bound of the ratio."""
    weight_level: RatioLevel | None = None
    """With "mask": the ratio that weights what the mask keeps; None: `level`."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(CorrectionKind):
            raise ConfigError(f"unknown kind {self.kind!r} of correction; set truncate or mask")
        for name in ("level", "weight_level"):
            value = getattr(self, name)
            if value not in (*get_args(RatioLevel), None) or self.level is None:
                raise ConfigError(
                    f"unknown {name} {value!r} of correction; set token, sequence or geometric"
                )
        if not 0 <= self.low < self.high < math.inf:
            raise ConfigError(
                f"correction with low={self.low} and high={self.high}; set 0 <= low < high"
            )
        if self.weight_level is not None and self.kind != "mask":
            raise ConfigError(
                f"weight_level={self.weight_level} has no effect with kind={self.kind}; set "
                "kind=mask, or leave it out"
            )

    def weights(
        self, fields: Mapping[str, Tensor], segments: Segments
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The weight of each token's policy loss, [R], and metrics.

        The metrics are engine_ratio and its maximum engine_ratio_max, before the bounds;
        engine_clip_fraction, the share outside of them; and kl_engine, the KL of the trainer's
        policy from the engine's (k3, nats).
        """
        log_ratio_R = fields["old_logprobs"].double() - fields[ENGINE_LOGPROBS]
        ratio_R = _ratio(log_ratio_R, self.level, segments)
        is_inside_R = (ratio_R >= self.low) & (ratio_R <= self.high)
        if self.kind == "truncate":
            weights_R = ratio_R.clamp(self.low, self.high)
        else:
            own = self.weight_level in (None, self.level)
            kept_R = ratio_R if own else _ratio(log_ratio_R, self.weight_level, segments)
            weights_R = kept_R * is_inside_R
        token_ratio_R = _ratio(log_ratio_R, "token", segments)
        return weights_R, {
            "engine_ratio": ratio_R,
            "engine_ratio_max": ratio_R,
            "engine_clip_fraction": (~is_inside_R).float(),
            "kl_engine": token_ratio_R - 1 - log_ratio_R,
        }


def _ratio(log_ratio_R: Tensor, level: RatioLevel | None, segments: Segments) -> Tensor:
    if level == "sequence":
        log_ratio_R = segments.spread(segments.sum(log_ratio_R))
    elif level == "geometric":
        log_ratio_R = segments.spread(segments.mean(log_ratio_R))
    return log_ratio_R.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp().float()
