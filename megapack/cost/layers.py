"""One kind of layer of a model: its widths, its weights and its floating-point operations.

A multiply and an add count as two operations. Attention is causal: a sample of L tokens has L^2 / 2
pairs of tokens. Per head, each pair costs two dot products of the head width: one for the scores,
one for the values. Layers G and M of a hybrid model have no squares: their scans work in chunks of
tokens, and cost the same for each token. Nor have layers with a sliding window: each token meets
as many keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from megapack.cost.options import ModelOptions
from megapack.cost.weights import LayerParameters, Split, Weight

MAMBA_CONV_TOKENS = 4
"""Tokens that the convolution of a layer M sees, Megatron's only value."""
# Tokens of a chunk: in fla's gated delta rule, and in mamba_ssm's scan.
DELTA_CHUNK = 64
_MAMBA_CHUNK = 128


@dataclass(frozen=True)
class Recurrent:
    """The sizes of a part G or M, which carries a state from token to token."""

    outputs: int
    """Channels of what the scan gives, and of the gate that multiplies it."""
    keys: int
    """Channels of queries, and of keys; of B, and of C."""
    scalars: int
    """Numbers per token beside them: a step or a decay and beta per head."""
    heads: int
    state: int
    """Numbers of a sample's state."""
    conv_tokens: int
    """Tokens that the convolution before the scan sees."""
    chunk_flops: int
    """Operations of a token's scores and products within its chunk."""
    state_passes: int
    """How often a token's products go through the whole state."""

    @property
    def convolved(self) -> int:
        """Channels of the convolution."""
        return self.outputs + 2 * self.keys

    @property
    def inner(self) -> int:
        """Channels of the projection to all of these."""
        return self.convolved + self.outputs + self.scalars


@dataclass(frozen=True)
class LayerKind:
    """Layers that are alike."""

    model: ModelOptions = field(hash=False)
    parts: str
    """Letters of what a layer runs one after the other, each behind a norm of its own; see
    `ModelOptions.hybrid_layer_pattern`."""
    window: int | None = None
    """Keys that a token meets in attention with a sliding window; None = all before it."""
    is_global: bool = False
    """Whether attention has the heads of global layers."""
    attention_factor: float = 1.0
    """What an operation of attention counts: in costs, where its kernels are slower than
    products, more than 1."""

    @property
    def num_experts(self) -> int:
        """Experts; 0 = the layer is dense."""
        return (self.model.num_experts or 0) if "E" in self.parts else 0

    @property
    def width(self) -> int:
        """Width inside the MLP, or inside an expert."""
        return self.model.expert_width if self.num_experts else self.model.dense_width

    @property
    def shared_width(self) -> int:
        """Width inside the shared expert; 0 = there is none."""
        return (self.model.moe_shared_ffn_hidden_size or 0) if self.num_experts else 0

    @property
    def head_width(self) -> int:
        """Channels of a head's queries and keys; without MLA also of its values."""
        return self.model.global_heads[0] if self.is_global else self.model.head_width

    @property
    def value_width(self) -> int:
        """Channels of a head's values."""
        return self.model.v_head_dim or self.head_width

    @property
    def rotary_width(self) -> int:
        """Channels of a head that are rotated."""
        return self.model.qk_rope_head_dim or self.head_width

    @property
    def groups(self) -> int:
        """Key and value heads."""
        return self.model.global_heads[1] if self.is_global else self.model.query_groups

    @property
    def keys_as_values(self) -> bool:
        """Whether the values are the keys, without a projection of their own."""
        return self.is_global and self.model.global_keys_as_values

    @property
    def indexer_widths(self) -> tuple[int, int]:
        """Channels of an indexer's key, and of the queries of all its heads; 0 without one."""
        width = self.model.indexer_head_dim or 0
        return width, width * (self.model.indexer_num_heads or 0)

    def recurrent(self) -> Recurrent:
        """The sizes of the layer's part G or M."""
        model = self.model
        if "G" in self.parts:
            heads, key_heads = model.linear_num_value_heads or 0, model.linear_num_key_heads or 0
            key, value = model.linear_key_head_dim or 0, model.linear_value_head_dim or 0
            # In a chunk: products of keys with keys and queries, the inverse times keys and values,
            # scores times values; then the state is read twice and written.
            chunk = 2 * DELTA_CHUNK * heads * (2 * key + (key + value) + value)
            state, tokens = heads * key * value, model.linear_conv_kernel_dim
            return Recurrent(
                heads * value, key_heads * key, 2 * heads, heads, state, tokens, chunk, 3
            )
        heads = model.mamba_num_heads or 0
        inner, states = heads * model.mamba_head_dim, model.mamba_num_groups * model.mamba_state_dim
        # In a chunk: C times B per group, scores times x; then the state is read and written.
        chunk, state = 2 * _MAMBA_CHUNK * (states + inner), inner * model.mamba_state_dim
        return Recurrent(inner, states, heads, heads, state, MAMBA_CONV_TOKENS, chunk, 2)

    def weights(self) -> list[Weight]:
        """All weights of a layer, by name."""
        return [weight for letter in self.parts for weight in weights_of_part(self, letter)]

    def layer_parameters(self, layer: int = 0, frozen: Sequence[str] = ()) -> LayerParameters:
        """Numbers of weights of one layer, by how they are split over GPUs.

        Args:
            layer: its number in the whole model, which globs may name.
            frozen: globs of names, as in `ModelOptions.freeze`; what they match is not counted.
        """
        counts = dict.fromkeys(LayerParameters._fields, 0)
        for weight in self.weights():
            counts[weight.kind] += weight.size * weight.num_left(layer, frozen)
        return LayerParameters(**counts)

    def layer_flops_per_token(self) -> float:
        """Operations of one layer's matrices and scans per token, forward."""
        mixers = sum(self._mixer_flops(letter) for letter in self.parts)
        return mixers + self.mlp_flops_per_token()

    def _mixer_flops(self, letter: str) -> float:
        """Operations per token of a part that mixes tokens, without the squares of attention."""
        if letter == "*":
            matrices = sum(
                weight.size
                for weight in weights_of_part(self, "*")
                if weight.name.endswith(".weight") and "norm" not in weight.name
            )
            return 2 * matrices + (self.window or 0) * 2 * self._flops_per_key()
        if letter not in "GM":
            return 0.0
        part = self.recurrent()
        matrices = self.model.hidden_size * (part.inner + part.outputs)
        conv = 2 * part.conv_tokens * part.convolved
        return 2 * matrices + conv + part.chunk_flops + 2 * part.state_passes * part.state

    def mlp_flops_per_token(self) -> float:
        """Operations of one layer's MLP, or of its router and experts, per token, forward."""
        if not set(self.parts) & set("-E"):
            return 0.0
        model, hidden = self.model, self.model.hidden_size
        channels, others = hidden * self.width, 0
        if self.num_experts:
            routed, latent = model.routed_width, model.moe_latent_size or 0
            channels = routed * self.width * model.moe_top_k + hidden * self.shared_width
            others = hidden * (self.num_experts + model.moe_shared_gate + 2 * latent)
        return 2.0 * (others + (3 if model.gated_linear_unit else 2) * channels)

    def layer_flops_per_token_sq(self) -> float:
        """Operations of one layer's attention per squared token of a sample, forward."""
        has_squares = "*" in self.parts and self.window is None
        return float(self._flops_per_key()) if has_squares else 0.0

    def _flops_per_key(self) -> float:
        """Half of the operations of a pair of tokens; a sample of L tokens has L^2 / 2 pairs.

        With an indexer, the scores of all keys are computed before and after its choice.
        """
        heads = self.model.num_attention_heads * (self.head_width + self.value_width)
        return self.attention_factor * (heads + self.indexer_widths[1])

    def layer_attention_tokens(self, tokens: float) -> float:
        """Operations of one layer's attention per token that meets so many keys, forward."""
        return 2 * tokens * self._flops_per_key() if "*" in self.parts else 0.0

    def layer_cp_bytes_per_token(self) -> float:
        """Bytes of a token's keys and values in one layer, 16-bit, which ranks that share a row
        exchange."""
        if "*" not in self.parts:
            return 0.0
        heads = self.model.num_attention_heads if self.model.uses_mla else self.groups
        return 2 * heads * (self.head_width + self.value_width)

    def layer_tp_bytes_per_token(self, tp: int) -> float:
        """Bytes per token that tensor parallelism moves per GPU in one layer's forward, 16-bit.

        An all-reduce of the hidden states per part of a layer, each 2 * (tp - 1) / tp times their
        bytes on a ring. Sequence parallelism replaces each by an all-gather and a reduce-scatter of
        the same bytes.
        """
        return len(self.parts) * 2 * (tp - 1) / tp * 2 * self.model.hidden_size

    def layer_cost(self, mean_length: float) -> float:
        """Operations of one layer's forward per token of samples of this length."""
        return self.layer_flops_per_token() + self.layer_flops_per_token_sq() * mean_length


def weights_of_part(kind: LayerKind, letter: str) -> Iterator[Weight]:
    """Weights of one part of a layer, with its norms in the residual stream.

    Args:
        letter: one of `kind.parts`.
    """
    model = kind.model
    hidden = model.hidden_size
    norms = (2 if model.norm_placement == "sandwich" else 1) * hidden
    if letter == "-":
        yield Weight("pre_mlp_layernorm.weight", norms, "whole")
        yield from _mlp_weights(model, "mlp", model.dense_width, "split", "whole")
    elif letter == "E":
        yield from _expert_weights(kind, norms)
    elif letter in "GM":
        yield from _recurrent_weights(kind, letter)
    else:
        yield Weight("input_layernorm.weight", norms, "whole")
        for weight in _attention_weights(kind):
            yield weight._replace(name=f"self_attention.{weight.name}")


def _mlp_weights(
    model: ModelOptions, name: str, width: int, kind: Split, kind_of_bias: Split | None = None
) -> Iterator[Weight]:
    """Weights of one feed-forward of this width."""
    inner = (2 if model.gated_linear_unit else 1) * width
    hidden = model.routed_width if kind == "experts" else model.hidden_size
    yield Weight(f"{name}.linear_fc1.weight", hidden * inner, kind)
    yield Weight(f"{name}.linear_fc2.weight", hidden * width, kind)
    if model.linear_bias:
        yield Weight(f"{name}.linear_fc1.bias", inner, kind)
        yield Weight(f"{name}.linear_fc2.bias", model.hidden_size, kind_of_bias or kind)


def _expert_weights(kind: LayerKind, norms: int) -> Iterator[Weight]:
    """Weights of the router, the experts and the shared one, and of the norms around them."""
    model, hidden = kind.model, kind.model.hidden_size
    if model.moe_inner_norms:
        yield Weight("post_mlp_layernorm.weight", hidden, "whole")
        for part in ("pre_shared", "post_shared", "pre_experts", "post_experts"):
            yield Weight(f"mlp.{part}_layernorm.weight", hidden, "whole")
        yield Weight("mlp.router.input_scale", hidden, "whole")
        yield Weight("mlp.router.score_scale", kind.num_experts, "whole")
    else:
        yield Weight("pre_mlp_layernorm.weight", norms, "whole")
    # Megatron-Core's shared experts have no biases.
    shared = _mlp_weights(model, "mlp.shared_experts", kind.shared_width, "split")
    yield from (weight for weight in shared if not weight.name.endswith("bias"))
    if model.moe_shared_gate:
        yield Weight("mlp.shared_experts.gate_weight", hidden, "whole")
    yield Weight("mlp.router.weight", hidden * kind.num_experts, "whole")
    for name in ("fc1", "fc2") if model.moe_latent_size else ():
        yield Weight(f"mlp.{name}_latent_proj.weight", hidden * model.routed_width, "whole")
    if model.linear_bias:
        yield Weight("mlp.router.bias", kind.num_experts, "whole")
    for weight in _mlp_weights(model, "mlp.experts.local_experts.{}", kind.width, "experts"):
        yield weight._replace(copies=kind.num_experts)


def _recurrent_weights(kind: LayerKind, letter: str) -> Iterator[Weight]:
    """Weights of a layer G or M, with its norms."""
    hidden, part = kind.model.hidden_size, kind.recurrent()
    mixer, norm = ("self_attention", "input_layernorm") if letter == "G" else ("mixer", "norm")
    if letter == "G":
        yield Weight(f"{mixer}.out_norm.weight", part.outputs // part.heads, "whole")
    else:
        yield Weight(f"{mixer}.conv1d.bias", part.convolved, "split")
        yield Weight(f"{mixer}.D", part.heads, "split")
        yield Weight(f"{mixer}.norm.weight", part.outputs, "split")
    yield Weight(f"{norm}.weight", hidden, "whole")
    yield Weight(f"{mixer}.in_proj.weight", hidden * part.inner, "split")
    yield Weight(f"{mixer}.out_proj.weight", hidden * part.outputs, "split")
    yield Weight(f"{mixer}.conv1d.weight", part.conv_tokens * part.convolved, "split")
    yield Weight(f"{mixer}.A_log", part.heads, "split")
    yield Weight(f"{mixer}.dt_bias", part.heads, "split")


def _attention_weights(kind: LayerKind) -> Iterator[Weight]:
    """Weights of the attention but the norm before it."""
    model = kind.model
    heads, hidden = model.num_attention_heads, model.hidden_size
    queries, keys = heads * kind.head_width, kind.groups * kind.head_width
    # Gates of heads are projected as queries are.
    inner = (1 + model.attention_output_gate) * queries + (1 if kind.keys_as_values else 2) * keys
    norms = {"q": queries, "k": keys}
    if not model.qk_layernorm_over_heads:
        norms = dict.fromkeys(norms, kind.head_width)
    if model.kv_lora_rank is None:
        yield Weight("linear_qkv.weight", hidden * inner, "split")
    else:
        norms = {"q": model.q_lora_rank or 0, "kv": model.kv_lora_rank}
        yield from _latent_weights(kind, model.kv_lora_rank)
    yield Weight("linear_proj.weight", heads * kind.value_width * hidden, "split")
    if model.linear_bias:
        yield Weight("linear_proj.bias", hidden, "whole")
    if model.qkv_bias or model.linear_bias:
        yield Weight("linear_qkv.bias", inner, "split")
    if model.attention_sinks:
        yield Weight("core_attention.softmax_offset", heads, "split")
    if model.qk_layernorm:
        for name, width in norms.items():
            yield Weight(f"{name}_layernorm.weight", width, "whole")


def _latent_weights(kind: LayerKind, latent: int) -> Iterator[Weight]:
    """Weights to latents, and to the keys that all heads share; then from latents to heads."""
    model = kind.model
    heads, hidden, compressed = model.num_attention_heads, model.hidden_size, model.q_lora_rank
    queries, rotated = heads * kind.head_width, kind.rotary_width
    up = heads * (kind.head_width - rotated + kind.value_width)
    yield Weight("linear_kv_down_proj.weight", hidden * (latent + rotated), "whole")
    yield Weight("linear_kv_up_proj.weight", latent * up, "split")
    if compressed is None:
        yield Weight("linear_q_proj.weight", hidden * queries, "split")
    else:
        yield Weight("linear_q_down_proj.weight", hidden * compressed, "whole")
        yield Weight("linear_q_up_proj.weight", compressed * queries, "split")
    key, of_heads = kind.indexer_widths
    indexer = (compressed or 0) * of_heads + hidden * (key + (model.indexer_num_heads or 0))
    yield Weight("core_attention.indexer.linear.weight", indexer, "whole")
    # With biases.
    yield Weight("core_attention.indexer.k_norm.weight", 2 * key, "whole")
