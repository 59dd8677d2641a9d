"""Rotary embeddings stretched beyond the length that a model was first trained on."""

from __future__ import annotations

import dataclasses
from typing import Literal

from megapack.errors import ConfigError

LLAMA3_POSITIONS = 8192
"""The original length of Llama 3, which Megatron-Core hard-codes with the two factors below."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How wavelengths of the rotary embedding are stretched. Keys of other kinds have no effect."""

    kind: Literal["none", "llama3", "yarn"] = "none"
    """none; llama3 (Llama 3.1 and later); yarn (arXiv 2309.00071; with multi-latent attention only,
    as DeepSeek-V3)."""
    factor: float = 1.0
    """By how much long wavelengths are stretched, 1 or more."""
    original_max_position_embeddings: int = LLAMA3_POSITIONS
    """Tokens of the longest sample before stretching; llama3 supports 8192 only."""
    low_freq_factor: float = 1.0
    """For llama3, 1 only: wavelengths above the original length divided by this are stretched."""
    high_freq_factor: float = 4.0
    """For llama3, 4 only: wavelengths below the original length divided by this are kept."""
    beta_fast: float = 32.0
    """For yarn: channels with more rotations than this over the original length are kept."""
    beta_slow: float = 1.0
    """For yarn: channels with fewer rotations than this are stretched in full."""
    mscale: float = 1.0
    """For yarn: weight of log(factor) in the scale of the rotated channels."""
    mscale_all_dim: float = 1.0
    """For yarn: weight of log(factor) in the scale of the attention scores, by which the scale of
    the rotated channels is divided."""

    def __post_init__(self) -> None:
        key = "model.rope_scaling"
        for name, least in (("factor", 1), ("original_max_position_embeddings", 1)):
            value = getattr(self, name)
            if not value >= least:
                raise ConfigError(f"{key}.{name} is {value}; set {least} or more")
        for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
            value = getattr(self, name)
            if not value > 0:
                raise ConfigError(f"{key}.{name} is {value}; set a number above 0")
        if self.kind != "llama3":
            return
        fixed = {
            "original_max_position_embeddings": LLAMA3_POSITIONS,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        }
        for name, only in fixed.items():
            value = getattr(self, name)
            if value != only:
                raise ConfigError(
                    f"{key}.{name} is {value}, Megatron-Core's llama3 scaling has {only:g} only; "
                    "use a model with that value"
                )
