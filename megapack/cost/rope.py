"""Rotary embeddings stretched beyond the length that a model was first trained on."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from megapack.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How wavelengths of the rotary embedding are stretched, as transformers computes it. Keys of
    other kinds have no effect."""

    kind: Literal["none", "linear", "llama3", "yarn", "longrope", "ntk", "proportional"] = "none"
    """linear: Gemma 3. llama3: Llama-3.1 and later. yarn: DeepSeek-V3, OLMo-3. longrope:
    Phi-4-mini. ntk: Hunyuan. proportional: Gemma 4. MLA has none and yarn."""
    factor: float = 1.0
    """By how much long wavelengths are stretched, 1 or more."""
    original_max_position_embeddings: int = 8192
    """Tokens of the longest sample before stretching."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above the original length / this are stretched."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below the original length / this are kept."""
    beta_fast: float = 32.0
    """yarn: channels with more rotations over the original length are kept."""
    beta_slow: float = 1.0
    """yarn: channels with fewer rotations are stretched in full."""
    truncate: bool = True
    """yarn without MLA: round the bounds of these channels."""
    mscale: float = 1.0
    """yarn with MLA: weight of log(factor) in the scale of rotated channels."""
    mscale_all_dim: float = 1.0
    """yarn with MLA: weight of log(factor) in the scale of attention scores."""
    attention_factor: float | None = None
    """longrope, and yarn without MLA: scale of rotated channels; null = from the factor."""
    short_factor: tuple[float, ...] = ()
    """longrope: stretch of each pair of channels, up to the original length."""
    long_factor: tuple[float, ...] = ()
    """longrope: the same in longer samples."""
    rotated_part: float = 1.0
    """proportional: part of a head's pairs that is rotated (Gemma 4: `0.25`)."""

    def __post_init__(self) -> None:
        key = "model.rope_scaling"
        for name, least in (("factor", 1), ("original_max_position_embeddings", 1)):
            value = getattr(self, name)
            if not value >= least:
                raise ConfigError(f"{key}.{name} is {value}; set {least} or more")
        positive = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
        for name in (*positive, "mscale", "mscale_all_dim", "attention_factor"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{key}.{name} is {value}; set a number above 0")
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"{key}.high_freq_factor is {self.high_freq_factor}; set more than low_freq_factor="
                f"{self.low_freq_factor}"
            )
        if not 0 < self.rotated_part <= 1:
            raise ConfigError(f"{key}.rotated_part is {self.rotated_part}; set a number in (0, 1]")
        if self.kind == "longrope":
            self._check_factors(key)

    def _check_factors(self, key: str) -> None:
        counts = (len(self.short_factor), len(self.long_factor))
        if counts[0] != counts[1] or not min((1, *self.short_factor, *self.long_factor)) > 0:
            raise ConfigError(
                f"{key} has {counts[0]} numbers in short_factor and {counts[1]} in long_factor; "
                "set as many of both, all above 0"
            )

    @property
    def rotation_scale(self) -> float:
        """Factor of rotated queries and keys, without multi-latent attention."""
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor == 1:
            return 1.0
        if self.kind == "yarn":
            return 0.1 * math.log(self.factor) + 1
        growth = math.log(self.factor) / math.log(self.original_max_position_embeddings)
        return math.sqrt(1 + growth)

    @property
    def depends_on_length(self) -> bool:
        """Whether samples above the original length are rotated otherwise than shorter ones."""
        return self.kind == "longrope" and self.short_factor != self.long_factor
