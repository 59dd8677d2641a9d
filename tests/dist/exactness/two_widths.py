"""Megatron's own attention with values that are not as wide as keys, for the reference."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.dot_product_attention import DotProductAttention


class TwoWidths(DotProductAttention):
    """Megatron's attention for MLA, whose values are not as wide as its keys."""

    def __init__(
        self, *args: Any, k_channels: Any = None, v_channels: Any = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        width = self.config.v_head_dim
        self.hidden_size_per_partition = width * self.config.num_attention_heads
