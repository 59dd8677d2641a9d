"""Weights and floating-point operations of a transformer, from its sizes.

A multiply and an add count as two operations. Attention is causal: a sample of L tokens has L^2 / 2
pairs of tokens. Per head, each pair costs two dot products of the head width: one for the scores,
one for the values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megapack.base.arrays import Ints
from megapack.cost.stages import StageLayers
from megapack.errors import ConfigError
from megapack.layout import Layout

VOCAB_MULTIPLE = 128
"""Vocabularies are padded to a multiple of this: 259 becomes 384. It is a multiple of every common
tp, so that the padded size does not depend on tp."""


class LayerParameters(NamedTuple):
    """Numbers of weights of one layer."""

    split: int
    """Matrices of attention and MLP: split over TP."""
    whole: int
    """Norms and the router: on every TP rank."""
    experts: int
    """All experts: split over EP and expert TP."""


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """A GPT with grouped-query attention, dense or with experts."""

    num_layers: int
    """Transformer layers."""
    hidden_size: int
    """Width of the residual stream."""
    ffn_hidden_size: int
    """Width of a dense layer's feed-forward, or of one expert if `num_experts` is set."""
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
    qk_layernorm: bool = False
    """Norms of each head's queries and keys."""
    num_experts: int | None = None
    """Experts per layer; None = a dense model."""
    experts_per_token: int = 1
    """Experts that a token is routed to (top-k)."""
    shared_expert_ffn_hidden_size: int = 0
    """Width of the shared expert, which every token goes through; 0 = no shared expert."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0 if name == "shared_expert_ffn_hidden_size" else 1
            is_flag = name in ("gated", "qk_layernorm")
            if not is_flag and value is not None and (type(value) is not int or value < least):
                raise ConfigError(f"{name}={value!r}; set an integer of at least {least}")

    @property
    def head_width(self) -> int:
        """Channels of one head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    def layer_parameters(self) -> LayerParameters:
        """Numbers of weights of one layer, by how they are split over GPUs."""
        queries = self.num_attention_heads * self.head_width
        keys = (self.num_query_groups or self.num_attention_heads) * self.head_width
        attention = self.hidden_size * (2 * queries + 2 * keys)
        mlp = (3 if self.gated else 2) * self.hidden_size
        norms = 2 * self.hidden_size + (2 * self.head_width if self.qk_layernorm else 0)
        if self.num_experts is None:
            return LayerParameters(attention + mlp * self.ffn_hidden_size, norms, 0)
        return LayerParameters(
            split=attention + mlp * self.shared_expert_ffn_hidden_size,
            whole=norms + self.hidden_size * self.num_experts,
            experts=mlp * self.ffn_hidden_size * self.num_experts,
        )

    def layer_flops_per_token(self) -> float:
        """Operations of one layer's matrices per token, forward."""
        queries = self.num_attention_heads * self.head_width
        keys = (self.num_query_groups or self.num_attention_heads) * self.head_width
        attention = 2 * self.hidden_size * (2 * queries + 2 * keys)
        return attention + self.mlp_flops_per_token()

    def mlp_flops_per_token(self) -> float:
        """Operations of one layer's MLP, or of its router and experts, per token, forward."""
        matrices = 3 if self.gated else 2
        width = self.ffn_hidden_size
        router = 0
        if self.num_experts is not None:
            width = width * self.experts_per_token + self.shared_expert_ffn_hidden_size
            router = 2 * self.hidden_size * self.num_experts
        return float(router + 2 * self.hidden_size * matrices * width)

    def layer_flops_per_token_sq(self) -> float:
        """Operations of one layer's attention per squared token of a sample, forward."""
        return 2.0 * self.num_attention_heads * self.head_width

    def layer_tp_bytes_per_token(self, tp: int) -> float:
        """Bytes per token that tensor parallelism moves per GPU in one layer's forward, 16-bit.

        Two all-reduces of the hidden states, each 2 * (tp - 1) / tp times their bytes on a ring.
        Sequence parallelism replaces each by an all-gather and a reduce-scatter of the same bytes.
        """
        return 2 * 2 * (tp - 1) / tp * 2 * self.hidden_size

    def head_flops_per_token(self) -> float:
        """Operations of the vocabulary projection per token, forward."""
        return 2.0 * self.hidden_size * self.vocab_size

    def embedding_flops_per_token(self) -> float:
        """Operations of the embedding lookup per token, counted as one addition per channel."""
        return float(self.hidden_size)

    def stage_weights(
        self,
        layout: Layout,
        mean_length: float,
        *,
        head_factor: float = 1.0,
        stage_layers: StageLayers | None = None,
    ) -> tuple[float, ...]:
        """Cost of each of the pp*vpp chunks divided by their mean.

        The first chunk also has the embedding, the last one the vocabulary head.

        Args:
            mean_length: tokens of a typical sample, for the share of attention.
            head_factor: see `CostModel.from_model`.
            stage_layers: layers of each chunk; None = equally many.

        Raises:
            ConfigError: the layers do not divide into chunks, or `stage_layers` does not fit.
        """
        split = stage_layers_of(self.num_layers, layout, stage_layers)
        layer = self.layer_cost(mean_length)
        cost = [layer * layers for layers in split.num_layers]
        cost[0] += self.embedding_flops_per_token()
        cost[-1] += head_factor * self.head_flops_per_token()
        mean = sum(cost) / len(cost)
        return tuple(c / mean for c in cost)

    def balanced_stage_layers(self, layout: Layout, mean_length: float) -> StageLayers:
        """The split whose costliest chunk costs the least, with the embedding and the head.

        Args:
            mean_length: tokens of a typical sample, for the share of attention.

        Raises:
            ConfigError: fewer layers than chunks.
        """
        layer = self.layer_cost(mean_length)
        return StageLayers.balanced(
            self.num_layers,
            pp=layout.pp,
            vpp=layout.vpp,
            embedding=self.embedding_flops_per_token() / layer,
            head=self.head_flops_per_token() / layer,
        )

    def layer_cost(self, mean_length: float) -> float:
        """Operations of one layer's forward per token of samples of this length."""
        return self.layer_flops_per_token() + self.layer_flops_per_token_sq() * mean_length


def typical_length(lengths: Ints) -> float:
    """Mean over tokens of their sample's length; 250 for samples of 100 and 300 tokens."""
    return float((lengths**2).sum() / lengths.sum())


def stage_layers_of(
    num_layers: int, layout: Layout, stage_layers: StageLayers | None
) -> StageLayers:
    """The given split, checked against a model and a layout; None = equally many layers.

    Raises:
        ConfigError: another number of layers or chunks, or layers that do not divide.
    """
    if stage_layers is None:
        return StageLayers.even(num_layers, pp=layout.pp, vpp=layout.vpp)
    split = (stage_layers.total, stage_layers.pp, stage_layers.vpp)
    needed = (num_layers, layout.pp, layout.vpp)
    if split != needed:
        names = ("num_layers", "pp", "vpp")
        texts = (
            ", ".join(f"{name}={n}" for name, n in zip(names, numbers, strict=True))
            for numbers in (split, needed)
        )
        raise ConfigError(
            "stage_layers splits {}; the model and layout have {}: set it to match".format(*texts)
        )
    return stage_layers
