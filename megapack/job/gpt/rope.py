"""Frequencies of rotary embeddings, as transformers computes them.

Megatron-Core has some of these scalings, with constants of its own: its llama3 stretches from 8192
tokens only, and errors of a log-prob are nats with another model. So the frequencies are computed
here, with the operations of transformers' modeling_rope_utils (5.23) in their order, and given to
Megatron's embedding.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megapack.cost.rope import RopeScaling
from megapack.job.config.sections import ModelConfig
from megapack.model.attention.rotary_tables import RotaryTable, use_tables


def set_rope(chunk: Any, model: ModelConfig) -> None:
    """Give a chunk's rotary embedding the model's frequencies, if Megatron computes others."""
    scaling = model.rope_scaling
    has_own = scaling.kind != "none" or model.local_rotary_base is not None
    if not has_own or model.kv_lora_rank is not None:
        return
    width = int(model.head_width * model.rotary_percent)

    def table(
        scaling: RopeScaling, base: int, width: int = width, *, long: bool = False
    ) -> RotaryTable:
        inv_freq = inverse_frequencies(scaling, base, width, long=long)
        return RotaryTable(inv_freq, scaling.rotation_scale)

    tables = [table(scaling, model.rotary_base, model.global_kv_channels or width)]
    short_tokens = scaling.original_max_position_embeddings
    if model.local_rotary_base is not None:
        tables.append(table(RopeScaling(), model.local_rotary_base))
        of_layers = [int(is_local) for is_local in model.local_layers]
        use_tables(chunk, tables, of_layers=of_layers)
    elif scaling.depends_on_length and model.max_position_embeddings > short_tokens:
        tables.append(table(scaling, model.rotary_base, long=True))
        use_tables(chunk, tables, short_tokens=short_tokens)
    else:
        use_tables(chunk, tables)


def inverse_frequencies(
    scaling: RopeScaling, base: int, width: int, *, long: bool = False
) -> Tensor:
    """Radians per position of each pair of channels: fp32 [width / 2], on the host.

    Args:
        width: rotated channels of a head.
        long: for longrope: of samples above the original length.
    """
    exponents = torch.arange(0, width, 2, dtype=torch.int64, device="cpu").float() / width
    stretched = scaling.factor ** (width / (width - 2)) if scaling.kind == "ntk" else 1
    periods = (base * stretched) ** exponents
    if scaling.kind == "longrope":
        stretch = torch.tensor(scaling.long_factor if long else scaling.short_factor, device="cpu")
        return 1.0 / (stretch.float() * periods)
    if scaling.kind == "llama3":
        return _llama3(1.0 / periods, scaling)
    if scaling.kind == "yarn":
        return _yarn(periods, scaling, base)
    stretches = scaling.kind in ("linear", "proportional")
    inv_freq = 1.0 / periods / (scaling.factor if stretches else 1.0)
    if scaling.kind == "proportional":
        inv_freq[int(scaling.rotated_part * width // 2) :] = 0
    return inv_freq


def _llama3(inv_freq: Tensor, scaling: RopeScaling) -> Tensor:
    """Long waves are stretched, short ones kept, and those between mixed."""
    original = scaling.original_max_position_embeddings
    low, high, factor = scaling.low_freq_factor, scaling.high_freq_factor, scaling.factor
    wavelength = 2 * math.pi / inv_freq
    kept = (original / wavelength - low) / (high - low)
    mixed = (1 - kept) * inv_freq / factor + kept * inv_freq
    inner = torch.where(wavelength < original / high, inv_freq, mixed)
    return torch.where(wavelength > original / low, inv_freq / factor, inner)


def _yarn(periods: Tensor, scaling: RopeScaling, base: int) -> Tensor:
    """Channels with many rotations are kept, those with few stretched, and those between mixed."""
    width = 2 * len(periods)
    original = scaling.original_max_position_embeddings

    def channel(rotations: float) -> float:
        """The pair that makes so many rotations over the original length."""
        return width * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    first, last = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    pairs = torch.arange(len(periods), dtype=torch.float32, device="cpu")
    ramp = ((pairs - first) / ((last - first) or 0.001)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (scaling.factor * periods) * (1 - kept) + 1.0 / periods * kept
