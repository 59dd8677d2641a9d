"""The weights of a layer by their names, as `ModelConfig.freeze` and checkpoints have them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

MAMBA_CONV_TOKENS = 4
"""Tokens that the convolution of a layer M sees, Megatron's only value."""
NOT_IN_MUON = (
    *("embedding.*", "output_layer.*", "*norm.weight", "*bias", "*.conv1d.*", "*.A_log", "*.D"),
    *("*.softmax_offset", "*.router.*_scale"),
)
"""Globs of the weights that Megatron's Muon leaves to Adam: those that are no matrices, and the
matrices of the vocabulary."""


class LayerParameters(NamedTuple):
    """Numbers of weights of one layer."""

    split: int
    """Matrices of attention and MLP, with biases, and all of layers G and M but G's norm: split
    over TP."""
    whole: int
    """Norms, the router, and MLA's projections to latents: on every TP rank."""
    experts: int
    """All experts: split over EP and expert TP."""


_Kind = Literal["split", "whole", "experts"]


class Weight(NamedTuple):
    """A parameter of a layer, or one of each expert."""

    name: str
    """After decoder.layers.N, in Megatron's local layers; {} is the number of the expert."""
    size: int
    kind: _Kind
    """The field of `LayerParameters` that counts it."""
    copies: int = 1

    def num_left(self, layer: int, frozen: Sequence[str]) -> int:
        """How many of the copies no glob matches."""
        if not frozen:
            return self.copies
        start = f"decoder.layers.{layer}.{self.name}"
        names = (start.format(expert) for expert in range(self.copies))
        return sum(not matches_any(name, frozen) for name in names)


def matches_any(name: str, globs: Sequence[str]) -> bool:
    """Whether a parameter's name in the whole model matches one of `ModelConfig.freeze`."""
    return any(fnmatchcase(name, glob) for glob in globs)


def weights_of_part(sizes: Any, letter: str) -> Iterator[Weight]:
    """Weights of one part of a layer, with its norms in the residual stream.

    Args:
        sizes: a `ModelSizes` of layers of one kind.
        letter: one of its `sublayers`.
    """
    hidden = sizes.hidden_size
    norms = sizes.norms_per_part * hidden
    if letter == "-":
        yield Weight("pre_mlp_layernorm.weight", norms, "whole")
        yield from _mlp_weights(sizes, "mlp", sizes.ffn_hidden_size, "split", "whole")
    elif letter == "E":
        num_experts = sizes.num_experts or 0
        shared = sizes.shared_expert_ffn_hidden_size
        if sizes.expert_inner_norms:
            yield Weight("post_mlp_layernorm.weight", hidden, "whole")
            for part in ("shared", "experts"):
                yield Weight(f"mlp.pre_{part}_layernorm.weight", hidden, "whole")
                yield Weight(f"mlp.post_{part}_layernorm.weight", hidden, "whole")
            yield Weight("mlp.router.input_scale", hidden, "whole")
            yield Weight("mlp.router.score_scale", num_experts, "whole")
        else:
            yield Weight("pre_mlp_layernorm.weight", norms, "whole")
        for name, size, kind, _ in _mlp_weights(sizes, "mlp.shared_experts", shared, "split"):
            if not name.endswith("bias"):
                yield Weight(name, size, kind)
        if sizes.shared_expert_gate:
            yield Weight("mlp.shared_experts.gate_weight", hidden, "whole")
        yield Weight("mlp.router.weight", hidden * num_experts, "whole")
        if sizes.linear_bias:
            yield Weight("mlp.router.bias", num_experts, "whole")
        one = _mlp_weights(sizes, "mlp.experts.local_experts.{}", sizes.ffn_hidden_size, "experts")
        for weight in one:
            yield weight._replace(copies=num_experts)
    elif letter in "GM":
        yield from _recurrent_weights(sizes, letter)
    else:
        yield Weight("input_layernorm.weight", norms, "whole")
        for name, size, kind, _ in attention_weights(sizes):
            yield Weight(f"self_attention.{name}", size, kind)


def _mlp_weights(
    sizes: Any, name: str, width: int, kind: _Kind, kind_of_bias: _Kind | None = None
) -> Iterator[Weight]:
    """Weights of one feed-forward of this width."""
    inner = (2 if sizes.gated else 1) * width
    yield Weight(f"{name}.linear_fc1.weight", sizes.hidden_size * inner, kind)
    yield Weight(f"{name}.linear_fc2.weight", sizes.hidden_size * width, kind)
    if sizes.linear_bias:
        yield Weight(f"{name}.linear_fc1.bias", inner, kind)
        yield Weight(f"{name}.linear_fc2.bias", sizes.hidden_size, kind_of_bias or kind)


def _recurrent_weights(sizes: Any, letter: str) -> Iterator[Weight]:
    """Weights of a layer G or M, with its norms."""
    hidden = sizes.hidden_size
    if letter == "G":
        mixer, norm, heads = "self_attention", "input_layernorm", sizes.linear_num_value_heads
        keys, out = sizes.delta_widths
        convolved, tokens = 2 * keys + out, sizes.linear_conv_kernel_dim
        yield Weight(f"{mixer}.out_norm.weight", sizes.linear_value_head_dim or 0, "whole")
    else:
        mixer, norm, heads = "mixer", "norm", sizes.mamba_num_heads
        out, states = sizes.mamba_widths
        convolved, tokens = out + 2 * states, MAMBA_CONV_TOKENS
        yield Weight(f"{mixer}.conv1d.bias", convolved, "split")
        yield Weight(f"{mixer}.D", heads or 0, "split")
        yield Weight(f"{mixer}.norm.weight", out, "split")
    yield Weight(f"{norm}.weight", hidden, "whole")
    yield Weight(f"{mixer}.in_proj.weight", sizes.mixer_weights(letter) - out * hidden, "split")
    yield Weight(f"{mixer}.out_proj.weight", out * hidden, "split")
    yield Weight(f"{mixer}.conv1d.weight", tokens * convolved, "split")
    yield Weight(f"{mixer}.A_log", heads or 0, "split")
    yield Weight(f"{mixer}.dt_bias", heads or 0, "split")


def attention_weights(sizes: Any) -> Iterator[Weight]:
    """Weights of the attention but the norm before it."""
    heads, hidden = sizes.num_attention_heads, sizes.hidden_size
    queries = heads * sizes.head_width
    keys = (sizes.num_query_groups or heads) * sizes.head_width
    inner, out = sizes.query_width + (1 if sizes.keys_as_values else 2) * keys, queries
    if sizes.kv_lora_rank is None:
        yield Weight("linear_qkv.weight", hidden * inner, "split")
    else:
        # To latents and to the keys that all heads share; then from latents to heads.
        latent, out = sizes.kv_lora_rank, heads * sizes.value_width
        width = heads * (sizes.head_width - sizes.rotary_width) + out
        yield Weight("linear_kv_down_proj.weight", hidden * (latent + sizes.rotary_width), "whole")
        yield Weight("linear_kv_up_proj.weight", latent * width, "split")
        if sizes.q_lora_rank is None:
            yield Weight("linear_q_proj.weight", hidden * queries, "split")
        else:
            yield Weight("linear_q_down_proj.weight", hidden * sizes.q_lora_rank, "whole")
            yield Weight("linear_q_up_proj.weight", sizes.q_lora_rank * queries, "split")
        indexer = "core_attention.indexer"
        yield Weight(f"{indexer}.linear.weight", sizes.indexer_weights, "whole")
        # With biases.
        yield Weight(f"{indexer}.k_norm.weight", 2 * (sizes.indexer_head_dim or 0), "whole")
    yield Weight("linear_proj.weight", out * hidden, "split")
    if sizes.linear_bias:
        yield Weight("linear_proj.bias", hidden, "whole")
    if sizes.qkv_bias or sizes.linear_bias:
        yield Weight("linear_qkv.bias", inner, "split")
    if sizes.attention_sinks:
        yield Weight("core_attention.softmax_offset", heads, "split")
    if sizes.qk_layernorm:
        widths = {"q": sizes.head_width, "k": sizes.head_width}
        if sizes.kv_lora_rank is not None:
            widths = {"q": sizes.q_lora_rank or 0, "kv": sizes.kv_lora_rank}
        elif sizes.qk_layernorm_over_heads:
            widths = {"q": queries, "k": keys}
        for name, width in widths.items():
            yield Weight(f"{name}_layernorm.weight", width, "whole")
