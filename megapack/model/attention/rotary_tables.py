"""Rotary tables of a chunk that has its own frequencies: several of them, or scaled rotations.

Megatron's rotary embedding makes one table per row from its `inv_freq`, the angles of each position
twice: of [a, b] the line [a, b, a, b]. So the frequencies of several tables, one after the other,
give all of them side by side. A row's lines are gathered from it once (see `rotary`). Then tokens
choose by the length of their sample (LongRoPE), or each layer takes its own (Gemma 3, OLMo-3),
which may be as wide as the layer's heads (Gemma 4).

Shape suffixes: T tokens of this rank's row, d angles of all tables, both times.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from megapack.model.attention.row import RowView


@dataclass(frozen=True)
class RotaryTable:
    """One table."""

    inv_freq: Tensor
    """fp32: radians per position, of each pair of channels."""
    scale: float = 1.0
    """Factor of the rotated channels."""


@dataclass(frozen=True)
class RotaryTables:
    """How tokens or layers choose among a chunk's tables."""

    num_angles: Sequence[int]
    """Angles of each table."""
    of_layers: Sequence[int] = ()
    """The table of each layer of the whole model; () = tokens choose."""
    short_tokens: int | None = None
    """Tokens of samples of up to so many take the first table, others the second."""

    def for_samples(self, table_Td: Tensor, row: RowView) -> Tensor:
        """The tables of a row by the lengths of its samples."""
        if self.short_tokens is None:
            return table_Td
        short, long = self._each(table_Td)
        is_long_T1 = (row.sample_tokens_T > self.short_tokens)[:, None]
        return torch.where(is_long_T1, long, short).repeat(1, 2)

    def for_layer(self, table_Td: Tensor, layer: int) -> Tensor:
        """The table of a layer, counted from 0 over the whole model."""
        if not self.of_layers:
            return table_Td
        return self._each(table_Td)[self.of_layers[layer]].repeat(1, 2)

    def _each(self, table_Td: Tensor) -> tuple[Tensor, ...]:
        """The angles of each table, once."""
        return torch.split(table_Td.chunk(2, dim=1)[0], list(self.num_angles), dim=1)


def use_tables(
    chunk: Any,
    tables: Sequence[RotaryTable],
    *,
    of_layers: Sequence[int] = (),
    short_tokens: int | None = None,
) -> None:
    """Give a chunk's rotary embedding its frequencies, before the first forward.

    Args:
        chunk: with Megatron's RotaryEmbedding, not wrapped.
        tables: one, or several, whose rows need `rotary.gather_rotary_tables`; those among which
            tokens choose are of the same width.
        of_layers, short_tokens: see `RotaryTables`.
    """
    rotary = chunk.rotary_pos_emb
    freqs = [table.inv_freq for table in tables]
    rotary.inv_freq = torch.cat(freqs).to(rotary.inv_freq.device)
    if len(tables) > 1:
        rotary.tables = RotaryTables([*map(len, freqs)], of_layers, short_tokens)
    for attention in chunk.modules():
        if isinstance(attention, SelfAttention):
            index = of_layers[attention.layer_number - 1] if of_layers else 0
            _scale_rotation(attention, tables[index].scale)


def tables_of(chunk: Any) -> RotaryTables | None:
    """The tables of a chunk that has several."""
    found: RotaryTables | None = getattr(getattr(chunk, "rotary_pos_emb", None), "tables", None)
    return found


def _scale_rotation(attention: Any, scale: float) -> None:
    """Let Megatron multiply the cosines and sines of a layer."""
    if scale == 1:
        return
    if hasattr(attention, "_yarn_concentration_factor"):
        attention._yarn_concentration_factor = scale
        return
    # Megatron-Core before 0.19 takes (0.1 a ln(f) + 1) / (0.1 b ln(f) + 1) from the layer's config
    # in each forward: with ln(f) = 10 and b = 0 it is a + 1.
    attention.config = copy.copy(attention.config)
    attention.config.yarn_rotary_scaling_factor = math.exp(10)
    attention.config.yarn_mscale = scale - 1
    attention.config.yarn_mscale_all_dim = 0.0
