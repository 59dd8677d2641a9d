"""Hybrid models of config.json: the letters of their layers, and the sizes of each kind.

A pattern has a letter for each of Megatron's layers (`ModelConfig.hybrid_layer_pattern`). A layer
of Qwen is two of them: what mixes tokens, then an MLP or experts. A layer of Nemotron-H is one.

transformers computes softplus(dt) of Nemotron-H's Mamba layers with a lower limit, `time_step_min`.
The models were trained without one, by Megatron, whose kernels have none; so has megapack.
"""

from __future__ import annotations

from megapack.cost.options import NEEDED
from megapack.cost.rope import RopeScaling
from megapack.job.config import hf_experts as experts
from megapack.job.config import hf_parts as parts
from megapack.job.config.hf_reader import Reader, Values

# The kinds of layers that transformers 4 and remote code name otherwise than transformers 5.
_NEMOTRON_LETTERS = {
    "linear_attention": "M",
    "mamba": "M",
    "full_attention": "*",
    "attention": "*",
    "mlp": "-",
    "moe": "E",
}
_NEMOTRON_KEYS = {
    "intermediate_size": "ffn_hidden_size",
    "layer_norm_epsilon": "norm_epsilon",
    "ssm_state_size": "mamba_state_dim",
    "n_groups": "mamba_num_groups",
}
_QWEN_LETTERS = {"linear_attention": "G", "full_attention": "*"}


# --- Qwen3-Next, Qwen3.5 ---------------------------------------------------------------------


def qwen_sizes(reader: Reader) -> Values:
    return {
        **parts.sizes(reader),
        "norm_epsilon": reader.number("rms_norm_eps"),
        **parts.rope(reader),
        **reader.counts(*NEEDED["G"], "linear_conv_kernel_dim"),
    }


def _mixers(reader: Reader) -> str:
    """The letter of each layer's mixer: G, or attention in every so many layers."""
    num_layers = reader.count("num_hidden_layers", 1)
    interval = reader.count("full_attention_interval", 1, 4)
    kinds = reader.get("layer_types", None)
    if kinds is None:
        return "".join("G" if layer % interval else "*" for layer in range(1, num_layers + 1))
    letters = reader.letters("layer_types", kinds, _QWEN_LETTERS)
    if len(letters) != num_layers:
        raise reader.error("layer_types", kinds, f"num_hidden_layers is {num_layers}")
    return letters


def _pattern(mixers: str, mlps: str) -> Values:
    pattern = "".join(mixer + mlp for mixer, mlp in zip(mixers, mlps, strict=True))
    return {"num_layers": len(pattern), "hybrid_layer_pattern": pattern}


def qwen3_next_layers(reader: Reader) -> Values:
    """Blocks with experts in every so many, but for those that `mlp_only_layers` lists."""
    mixers = _mixers(reader)
    dense = reader.layers("mlp_only_layers")
    step = reader.count("decoder_sparse_step", 1)
    has_experts = reader.count("num_experts", 0) > 0
    mlps = "".join(
        "E" if has_experts and layer not in dense and (layer + 1) % step == 0 else "-"
        for layer in range(len(mixers))
    )
    values = {**_pattern(mixers, mlps), "ffn_hidden_size": reader.count("intermediate_size", 1)}
    if "E" in mlps:
        values |= {**experts.softmax_experts(reader), **experts.gated_shared_expert(reader)}
    return values


def dense_layers(reader: Reader) -> Values:
    mixers = _mixers(reader)
    width = reader.count("intermediate_size", 1)
    return {**_pattern(mixers, "-" * len(mixers)), "ffn_hidden_size": width}


def expert_layers(reader: Reader) -> Values:
    mixers = _mixers(reader)
    return {
        **_pattern(mixers, "E" * len(mixers)),
        # No layer is dense.
        "ffn_hidden_size": None,
        **experts.softmax_experts(reader),
        **experts.gated_shared_expert(reader),
    }


# --- Nemotron-H, Nemotron-3 ------------------------------------------------------------------


def _nemotron_layers(reader: Reader) -> str:
    """The pattern, from letters or from a list of kinds."""
    found = set()
    for key in ("layers_block_type", "layer_types"):
        kinds = reader.get(key, None)
        if kinds is not None:
            found.add(reader.letters(key, kinds, _NEMOTRON_LETTERS))
    letters = reader.get("hybrid_override_pattern", None)
    if letters is not None:
        if not isinstance(letters, str) or not letters or set(letters) - set("M*-E"):
            raise reader.error("hybrid_override_pattern", letters, "expected letters of M*-E")
        found.add(letters)
    if len(found) != 1:
        why = "layers_block_type says otherwise: keep one" if found else "it is missing: write it"
        raise reader.error("hybrid_override_pattern", letters, why)
    pattern = found.pop()
    reader.count("num_hidden_layers", 1, len(pattern))
    reader.require("num_hidden_layers", len(pattern))
    return pattern


def nemotron_sizes(reader: Reader) -> Values:
    pattern = _nemotron_layers(reader)
    values = {
        **parts.sizes(reader),
        "num_layers": len(pattern),
        "hybrid_layer_pattern": pattern,
        # Attention without positions: the rotary keys are those that have no effect.
        "rotary_base": 10000,
        "rotary_percent": 1.0,
        "rope_scaling": RopeScaling(),
        **reader.counts("mamba_num_heads", "mamba_head_dim"),
        **reader.options(_NEMOTRON_KEYS),
    }
    reader.require("attention_head_dim", values["kv_channels"])
    if "M" in pattern:
        _check_mamba(reader, values["norm_epsilon"])
    latent = reader.optional_count("moe_latent_size", None)
    if "E" in pattern:
        reader.require("n_shared_experts", 1)
        shared = reader.count("moe_shared_expert_intermediate_size", 1)
        values |= {
            **experts.sigmoid_experts(reader),
            "moe_shared_ffn_hidden_size": shared,
            "moe_latent_size": latent,
        }
    return values


def _check_mamba(reader: Reader, epsilon: float) -> None:
    """Refuse what Megatron's Mamba mixer has no setting for."""
    reader.require("conv_kernel", 4)
    if epsilon != 1e-5:
        why = "Megatron-Core's norm inside a Mamba layer has 1e-05 only"
        raise reader.error("layer_norm_epsilon", epsilon, why)
    limit = reader.get("time_step_limit", None)
    # JSON has no infinity: Python writes Infinity, transformers 5 an object.
    if limit not in (None, [0.0, float("inf")], [0.0, {"__float__": "Infinity"}]):
        raise reader.error("time_step_limit", limit, "Megatron-Core's kernels have no such limit")
