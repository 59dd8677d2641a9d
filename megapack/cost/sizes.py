"""Weights and floating-point operations of a transformer, from its sizes.

A multiply and an add count as two operations. Attention is causal: a sample of L tokens has L^2 / 2
pairs of tokens. Per head, each pair costs two dot products of the head width: one for the scores,
one for the values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
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
    """Matrices of attention and MLP, with biases: split over TP."""
    whole: int
    """Norms, the router, and MLA's projections to latents: on every TP rank."""
    experts: int
    """All experts: split over EP and expert TP."""


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """A GPT with grouped-query or multi-latent attention, dense or with experts.

    A model with experts may begin with dense layers. Methods that speak of a layer mean one of the
    others; `layer_kinds` has both.
    """

    num_layers: int
    """Transformer layers."""
    hidden_size: int
    """Width of the residual stream."""
    ffn_hidden_size: int
    """Width of the feed-forward, or of one expert if `num_experts` is set."""
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
    """Norms of each head's queries and keys, or of MLA's latents."""
    qkv_bias: bool = False
    """Biases of queries, keys and values."""
    kv_lora_rank: int | None = None
    """Channels of the latent of keys and values: multi-latent attention (MLA, DeepSeek); None =
    grouped queries. MLA needs the three widths below."""
    q_lora_rank: int | None = None
    """Channels of the latent of queries in MLA; None = queries are projected directly."""
    qk_nope_head_dim: int | None = None
    """Width of an MLA head's queries and keys that is not rotated."""
    qk_rope_head_dim: int | None = None
    """Width of an MLA head's queries and keys that is rotated; all heads share these keys."""
    v_head_dim: int | None = None
    """Width of an MLA head's values."""
    num_experts: int | None = None
    """Experts per layer; None = a dense model."""
    experts_per_token: int = 1
    """Experts that a token is routed to (top-k)."""
    shared_expert_ffn_hidden_size: int = 0
    """Width of the shared expert, which every token goes through; 0 = no shared expert."""
    shared_expert_gate: bool = False
    """A gate of one number per token on the shared expert (Qwen2-MoE)."""
    first_dense_layers: int = 0
    """Layers at the beginning that have a dense feed-forward instead of experts."""
    dense_ffn_hidden_size: int | None = None
    """Width of their feed-forward."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0 if name in ("shared_expert_ffn_hidden_size", "first_dense_layers") else 1
            is_flag = name in ("gated", "qk_layernorm", "qkv_bias", "shared_expert_gate")
            if not is_flag and value is not None and (type(value) is not int or value < least):
                raise ConfigError(f"{name}={value!r}; set an integer of at least {least}")
        widths = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        missing = [name for name in widths if getattr(self, name) is None]
        if self.kv_lora_rank is not None and missing:
            raise ConfigError(f"kv_lora_rank={self.kv_lora_rank} without {missing[0]}; set it too")
        if self.first_dense_layers and None in (self.num_experts, self.dense_ffn_hidden_size):
            raise ConfigError(
                f"first_dense_layers={self.first_dense_layers} needs num_experts and "
                "dense_ffn_hidden_size; set them too"
            )

    @property
    def uses_mla(self) -> bool:
        """Whether attention is multi-latent."""
        return self.kv_lora_rank is not None

    @property
    def head_width(self) -> int:
        """Channels of a head's queries and keys; without MLA also of its values."""
        if self.uses_mla:
            return (self.qk_nope_head_dim or 0) + (self.qk_rope_head_dim or 0)
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def value_width(self) -> int:
        """Channels of a head's values."""
        return self.v_head_dim or self.head_width

    @property
    def rotary_width(self) -> int:
        """Channels of a head that are rotated."""
        return self.qk_rope_head_dim or self.head_width

    def layer_kinds(
        self, first: int = 0, num_layers: int | None = None
    ) -> Iterator[tuple[ModelSizes, int]]:
        """The kinds of layers among some that follow each other, each with how many there are.

        Args:
            first: the first of these layers, from 0.
            num_layers: how many; None = all from `first` on.

        Returns:
            Sizes of a model that has only layers of this kind, and their number, which is not 0.
        """
        end = self.num_layers if num_layers is None else first + num_layers
        dense = max(0, min(end, self.first_dense_layers) - first)
        if dense:
            kind = replace(
                self,
                num_experts=None,
                ffn_hidden_size=self.dense_ffn_hidden_size or self.ffn_hidden_size,
                shared_expert_ffn_hidden_size=0,
                shared_expert_gate=False,
                first_dense_layers=0,
            )
            yield kind, dense
        if end - first - dense > 0:
            yield replace(self, first_dense_layers=0), end - first - dense

    def layer_parameters(self) -> LayerParameters:
        """Numbers of weights of one layer, by how they are split over GPUs."""
        split, whole = self._attention_weights()
        if self.qkv_bias:
            keys = (self.num_query_groups or self.num_attention_heads) * self.head_width
            split += self.num_attention_heads * self.head_width + 2 * keys
        mlp = (3 if self.gated else 2) * self.hidden_size
        whole += 2 * self.hidden_size + self._qk_norms()
        if self.num_experts is None:
            return LayerParameters(split + mlp * self.ffn_hidden_size, whole, 0)
        gate = self.hidden_size if self.shared_expert_gate else 0
        return LayerParameters(
            split=split + mlp * self.shared_expert_ffn_hidden_size,
            whole=whole + self.hidden_size * self.num_experts + gate,
            experts=mlp * self.ffn_hidden_size * self.num_experts,
        )

    def _attention_weights(self) -> tuple[int, int]:
        """Weights of the attention's matrices: split over TP, and on every TP rank."""
        heads = self.num_attention_heads
        queries = heads * self.head_width
        if self.kv_lora_rank is None:
            keys = (self.num_query_groups or heads) * self.head_width
            return self.hidden_size * (2 * queries + 2 * keys), 0
        # To latents and to the keys that all heads share; then from latents to heads.
        latents = (self.q_lora_rank or 0) + self.kv_lora_rank + self.rotary_width
        of_queries = (self.q_lora_rank or self.hidden_size) * queries
        of_keys = self.kv_lora_rank * heads * (self.head_width - self.rotary_width)
        of_values = self.kv_lora_rank * heads * self.value_width
        out = heads * self.value_width * self.hidden_size
        return of_queries + of_keys + of_values + out, self.hidden_size * latents

    def _qk_norms(self) -> int:
        if not self.qk_layernorm:
            return 0
        if self.kv_lora_rank is None:
            return 2 * self.head_width
        return (self.q_lora_rank or 0) + self.kv_lora_rank

    def layer_flops_per_token(self) -> float:
        """Operations of one layer's matrices per token, forward."""
        return 2 * sum(self._attention_weights()) + self.mlp_flops_per_token()

    def mlp_flops_per_token(self) -> float:
        """Operations of one layer's MLP, or of its router and experts, per token, forward."""
        matrices = 3 if self.gated else 2
        width = self.ffn_hidden_size
        router = 0
        if self.num_experts is not None:
            width = width * self.experts_per_token + self.shared_expert_ffn_hidden_size
            router = 2 * self.hidden_size * (self.num_experts + int(self.shared_expert_gate))
        return float(router + 2 * self.hidden_size * matrices * width)

    def layer_flops_per_token_sq(self) -> float:
        """Operations of one layer's attention per squared token of a sample, forward."""
        return float(self.num_attention_heads * (self.head_width + self.value_width))

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
        cost = [
            sum(kind.layer_cost(mean_length) * n for kind, n in self.layer_kinds(first, layers))
            for first, layers in zip(split.offsets, split.num_layers, strict=True)
        ]
        cost[0] += self.embedding_flops_per_token()
        cost[-1] += head_factor * self.head_flops_per_token()
        mean = sum(cost) / len(cost)
        return tuple(c / mean for c in cost)

    def balanced_stage_layers(self, layout: Layout, mean_length: float) -> StageLayers:
        """The split whose costliest chunk costs the least, with the embedding and the head.

        What first dense layers cost more or less than the others counts on the first chunk.

        Args:
            mean_length: tokens of a typical sample, for the share of attention.

        Raises:
            ConfigError: fewer layers than chunks.
        """
        layer = self.layer_cost(mean_length)
        extra = sum(n * (kind.layer_cost(mean_length) - layer) for kind, n in self.layer_kinds())
        return StageLayers.balanced(
            self.num_layers,
            pp=layout.pp,
            vpp=layout.vpp,
            embedding=(extra + self.embedding_flops_per_token()) / layer,
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
