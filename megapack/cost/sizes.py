"""Floating-point operations of a transformer, from its sizes.

Multiply and add count as two. Attention is causal: a sample of L tokens has L^2 / 2 pairs, and each
costs two products of the head width per head, in scores and in values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megapack.errors import ConfigError
from megapack.layout import Layout


class LayerParameters(NamedTuple):
    """Numbers of weights."""

    split: int
    """Matrices of attention and MLP: split over TP."""
    whole: int
    """Norms and the router: on every TP rank."""
    experts: int
    """Of all experts: split over EP, and over TP where experts have it."""


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """A GPT with grouped-query attention, dense or with experts."""

    num_layers: int
    """Transformer layers."""
    hidden_size: int
    """Width of the residual stream."""
    ffn_hidden_size: int
    """Width of a dense layer's feed-forward; of one expert where `num_experts` is set."""
    num_attention_heads: int
    """Query heads."""
    vocab_size: int
    """Rows of the embedding."""
    num_query_groups: int | None = None
    """Key and value heads; as many as query heads by default."""
    kv_channels: int | None = None
    """Width of a head; hidden_size / num_attention_heads by default."""
    gated: bool = True
    """Three matrices per feed-forward (SwiGLU); two if not gated."""
    num_experts: int | None = None
    """Experts of every layer; a dense model by default."""
    experts_per_token: int = 1
    """Experts that a token goes through."""
    shared_expert_ffn_hidden_size: int = 0
    """Width of an expert that every token goes through; 0 = no such expert."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0 if name == "shared_expert_ffn_hidden_size" else 1
            if name != "gated" and value is not None and (type(value) is not int or value < least):
                raise ConfigError(f"{name}={value!r}; set an integer of at least {least}")

    @property
    def head_width(self) -> int:
        """Channels of one head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    def layer_parameters(self) -> LayerParameters:
        """Weights of one layer, by how they are split over GPUs."""
        queries = self.num_attention_heads * self.head_width
        keys = (self.num_query_groups or self.num_attention_heads) * self.head_width
        attention = self.hidden_size * (2 * queries + 2 * keys)
        mlp = (3 if self.gated else 2) * self.hidden_size
        norms = 2 * self.hidden_size
        if self.num_experts is None:
            return LayerParameters(attention + mlp * self.ffn_hidden_size, norms, 0)
        return LayerParameters(
            split=attention + mlp * self.shared_expert_ffn_hidden_size,
            whole=norms + self.hidden_size * self.num_experts,
            experts=mlp * self.ffn_hidden_size * self.num_experts,
        )

    def layer_flops_per_token(self) -> float:
        """One layer's matrices, forward."""
        queries = self.num_attention_heads * self.head_width
        keys = (self.num_query_groups or self.num_attention_heads) * self.head_width
        attention = 2 * self.hidden_size * (2 * queries + 2 * keys)
        matrices = 3 if self.gated else 2
        width = self.ffn_hidden_size
        router = 0
        if self.num_experts is not None:
            width = width * self.experts_per_token + self.shared_expert_ffn_hidden_size
            router = 2 * self.hidden_size * self.num_experts
        return float(attention + router + 2 * self.hidden_size * matrices * width)

    def layer_flops_per_token_sq(self) -> float:
        """One layer's attention, forward, per squared token of a sample."""
        return 2.0 * self.num_attention_heads * self.head_width

    def layer_tp_bytes_per_token(self, tp: int) -> float:
        """One layer's tensor-parallel traffic of a GPU, 16-bit, forward.

        Two all-reduces of the hidden states, each 2 * (tp - 1) / tp times their bytes on a ring;
        sequence parallelism makes of each an all-gather and a reduce-scatter of the same bytes.
        """
        return 2 * 2 * (tp - 1) / tp * 2 * self.hidden_size

    def head_flops_per_token(self) -> float:
        """The vocabulary projection, forward."""
        return 2.0 * self.hidden_size * self.vocab_size

    def embedding_flops_per_token(self) -> float:
        """The lookup, counted as one addition per channel."""
        return float(self.hidden_size)

    def stage_weights(self, layout: Layout, mean_length: float) -> tuple[float, ...]:
        """Cost of the pp*vpp chunks over their mean: the embedding first, the head last.

        Args:
            mean_length: tokens of a typical sample, for the share of attention.

        Raises:
            ConfigError: layers that do not divide into chunks.
        """
        chunks = layout.num_chunks
        if self.num_layers % chunks:
            raise ConfigError(
                f"num_layers={self.num_layers} do not divide into pp*vpp={chunks} chunks; set "
                "stage_weights by hand, or another pp or vpp"
            )
        layer = self.layer_flops_per_token() + self.layer_flops_per_token_sq() * mean_length
        cost = [layer * self.num_layers / chunks] * chunks
        cost[0] += self.embedding_flops_per_token()
        cost[-1] += self.head_flops_per_token()
        mean = sum(cost) / chunks
        return tuple(c / mean for c in cost)
