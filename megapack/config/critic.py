"""The config's section `critic`: PPO's value model."""

from __future__ import annotations

import dataclasses

from megapack.config.bounds import at_least
from megapack.config.model import ModelConfig
from megapack.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """A second model with a value head, from whose values GAE computes advantages per token.

    It has the policy's sizes, initial weights and layout, an own optimizer with the settings of
    `optim`, and trains all of its weights. See docs/critics.md.
    """

    enabled: bool = False
    """Train a critic. Samples then need a `reward`; objective.kind must be ppo or grpo."""
    lr: float | None = None
    """The highest learning rate; it decays as the policy's, by the same factor. null = optim.lr."""
    clip: float | None = 0.2
    """A value counts in the loss at most this far from the value that the batch began with, as in
    PPO's clipped value loss; null = no clipping."""
    whiten_advantages: bool = True
    """Give the advantages mean 0 and variance 1 over the loss tokens of each batch."""

    def __post_init__(self) -> None:
        at_least(self, "critic", 0, "lr")
        if self.clip is not None and not self.clip > 0:
            raise ConfigError(f"critic.clip is {self.clip}; set a number above 0, or null")


def critic_model(policy: ModelConfig) -> ModelConfig:
    """The critic's model: the policy's with a value head, all weights trained, no MTP layers."""
    pattern = policy.hybrid_layer_pattern
    return dataclasses.replace(
        policy.with_value_head(),
        freeze=(),
        mtp_num_layers=0,
        hybrid_layer_pattern=pattern and pattern.partition("/")[0],
    )
