"""The config's section `critic`: PPO's value model."""

from __future__ import annotations

import dataclasses

from megapack.config.bounds import at_least
from megapack.cost.options import BYTE_VOCAB_SIZE
from megapack.errors import ConfigError
from megapack.job.config.hf_config import read_hf_config
from megapack.job.config.model import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """A second model with a value head, from whose values GAE computes advantages per token.

    It has the policy's layout, an own optimizer with the settings of `optim`, and trains all of its
    weights. See docs/critics.md.
    """

    enabled: bool = False
    """Train a critic. Needs rewards, and objective.kind ppo or grpo."""
    hf_path: str | None = None
    """A folder to start from, such as a reward model; its sizes may differ. null = the policy's
    weights."""
    warmup_steps: int = 0
    """First optimizer steps, which train the critic alone."""
    lr: float | None = None
    """The highest learning rate; null = optim.lr."""
    clip: float | None = 0.2
    """How far a value may move in a batch (PPO's clipped value loss); null = no clipping."""
    whiten_advantages: bool = True
    """Advantages get mean 0 and variance 1 over a batch's loss tokens."""

    def __post_init__(self) -> None:
        at_least(self, "critic", 0, "lr", "warmup_steps")
        if self.clip is not None and not self.clip > 0:
            raise ConfigError(f"critic.clip is {self.clip}; set a number above 0, or null")


def critic_model(policy: ModelConfig, hf_path: str | None = None) -> ModelConfig:
    """The critic's model: one with a value head, all weights trained, no MTP layers.

    Args:
        hf_path: see `CriticConfig.hf_path`.

    Raises:
        ConfigError: the folder cannot be read, or its model is not for the policy's tokens and
            layers.
    """
    if hf_path is None:
        pattern = policy.hybrid_layer_pattern
        return dataclasses.replace(
            policy.with_value_head(),
            freeze=(),
            mtp_num_layers=0,
            hybrid_layer_pattern=pattern and pattern.partition("/")[0],
        )
    try:
        others = ("hf_path", "freeze", "mtp_num_layers", "vision")
        architecture = {*read_hf_config(hf_path).values, *others}
        settings = {name: value for name, value in vars(policy).items() if name not in architecture}
        model = ModelConfig.from_hf(hf_path, **settings)
    except ConfigError as error:
        raise ConfigError(f"critic.hf_path: {error}") from None
    own = policy.vocab_size or BYTE_VOCAB_SIZE
    if model.vocab_size != own:
        raise ConfigError(
            f"critic.hf_path: {hf_path} has a vocabulary of {model.vocab_size} tokens and the "
            f"policy one of {own}; set a folder whose tokens are the policy's"
        )
    if model.layer_pattern not in (None, policy.layer_pattern):
        raise ConfigError(
            f"critic.hf_path: {hf_path} is a hybrid model with other layers than the policy's, so "
            "that rows of the policy's plans need not suit it; set a folder of the policy's "
            "family, or of a GPT"
        )
    return model.with_value_head()
