"""Hybrid families of config.json: the letters of their layers, and the sizes of each kind.

A pattern has a letter for each of Megatron's layers (`ModelConfig.hybrid_layer_pattern`). A layer
of Qwen is two of them: what mixes tokens, then an MLP or experts. A layer of Nemotron-H is one.

transformers computes softplus(dt) of Nemotron-H's Mamba layers with a lower limit, `time_step_min`.
The models were trained without one, by Megatron, whose kernels have none; so has megapack.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megapack.cost.options import NEEDED
from megapack.cost.rope import RopeScaling
from megapack.job.config import hf_experts as experts
from megapack.job.config import hf_parts as parts
from megapack.job.config.hf_reader import Family, Reader, Values

# The kinds of layers that transformers 4 and remote code name otherwise than transformers 5.
_NEMOTRON_LETTERS = {
    "linear_attention": "M",
    "mamba": "M",
    "full_attention": "*",
    "attention": "*",
    "mlp": "-",
    "moe": "E",
}
_QWEN_LETTERS = {"linear_attention": "G", "full_attention": "*"}


# --- Qwen3-Next, Qwen3.5 ---------------------------------------------------------------------


def _qwen_sizes(reader: Reader) -> Values:
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


def _qwen3_next_layers(reader: Reader) -> Values:
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


def _dense_layers(reader: Reader) -> Values:
    mixers = _mixers(reader)
    width = reader.count("intermediate_size", 1)
    return {**_pattern(mixers, "-" * len(mixers)), "ffn_hidden_size": width}


def _expert_layers(reader: Reader) -> Values:
    mixers = _mixers(reader)
    return {
        **_pattern(mixers, "E" * len(mixers)),
        # No layer is dense.
        "ffn_hidden_size": None,
        **experts.softmax_experts(reader),
        **experts.gated_shared_expert(reader),
    }


_QWEN_VALUES: Values = {
    "qk_layernorm": True,
    "attention_output_gate": True,
    "layernorm_zero_centered_gamma": True,
}
_QWEN_EXPERT_KEYS = (
    *("moe_intermediate_size", "num_experts_per_tok", "norm_topk_prob"),
    *("shared_expert_intermediate_size", "num_local_experts"),
)
_QWEN3_NEXT = Family(
    architecture="Qwen3NextForCausalLM",
    defaults={"partial_rotary_factor": 0.25, "head_dim": 256},
    off=("attention_bias", "use_sliding_window"),
    on=("attn_output_gate",),
    # Without experts those of experts have no effect.
    unused=_QWEN_EXPERT_KEYS,
    # The published file does not count it.
    num_mtp_layers=1,
    values=_QWEN_VALUES,
    is_partly_rotated=True,
    common=_qwen_sizes,
    parts=(_qwen3_next_layers,),
)
# Of the multimodal model: its vision part and the tokens that stand for images.
_VISION = (
    *("text_config", "vision_config", "image_token_id", "video_token_id"),
    *("vision_start_token_id", "vision_end_token_id", "language_model_only"),
)


def _qwen3_5(architecture: str, layers: Any, *, multimodal: bool) -> Family:
    return Family(
        architecture=architecture,
        defaults={"partial_rotary_factor": 0.25, "head_dim": 256, "norm_topk_prob": True},
        off=("attention_bias", "mtp_use_dedicated_embeddings"),
        on=("attn_output_gate", "norm_topk_prob"),
        only={"mlp_only_layers": ([], None), "decoder_sparse_step": (1,)},
        # `mamba_ssm_dtype` is of the states of an inference engine. With experts in every layer
        # `intermediate_size` has no effect.
        unused=(
            *("mamba_ssm_dtype", "intermediate_size"),
            *(_VISION if multimodal else ()),
        ),
        num_mtp_layers=0,
        # All three positions of a text token are the same one.
        unused_rope=("mrope_section", "mrope_interleaved"),
        values=_QWEN_VALUES,
        is_partly_rotated=True,
        common=_qwen_sizes,
        in_text_config=multimodal,
        parts=(layers,),
    )


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


def _nemotron_sizes(reader: Reader) -> Values:
    pattern = _nemotron_layers(reader)
    epsilon = reader.number("layer_norm_epsilon")
    values = {
        **parts.sizes(reader),
        "num_layers": len(pattern),
        "hybrid_layer_pattern": pattern,
        "ffn_hidden_size": reader.count("intermediate_size", 1),
        "norm_epsilon": epsilon,
        # Attention without positions: the rotary keys are those that have no effect.
        "rotary_base": 10000,
        "rotary_percent": 1.0,
        "rope_scaling": RopeScaling(),
        **reader.counts("mamba_num_heads", "mamba_head_dim"),
        "mamba_state_dim": reader.count("ssm_state_size", 1),
        "mamba_num_groups": reader.count("n_groups", 1),
    }
    reader.require("attention_head_dim", values["kv_channels"])
    if "M" in pattern:
        _check_mamba(reader, epsilon)
    if "E" in pattern:
        reader.require("n_shared_experts", 1)
        shared = reader.count("moe_shared_expert_intermediate_size", 1)
        values |= {**experts.sigmoid_experts(reader), "moe_shared_ffn_hidden_size": shared}
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


_NEMOTRON_H = Family(
    architecture="NemotronHForCausalLM",
    defaults={"head_dim": 128},
    off=("attention_bias", "mamba_proj_bias", "mlp_bias", "residual_in_fp32", "use_bias"),
    on=("use_conv_bias",),
    only={
        "hidden_dropout": (0.0, 0),
        "mamba_hidden_act": ("silu",),
        "mlp_hidden_act": ("relu2",),
        "moe_latent_size": (None,),
        "sliding_window": (None,),
    },
    unused=(
        # How layers are computed, or their first weights drawn.
        *("chunk_size", "expand", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap"),
        *("num_logits_to_keep", "rescale_prenorm_residual", "use_mamba_kernels"),
        *("time_step_floor", "time_step_max", "time_step_min"),
        # Remote code and other names of keys that are read; attention has no positions.
        *("auto_map", "norm_eps", "rms_norm_eps"),
        *("partial_rotary_factor", "rope_theta", "rope_parameters", "rope_scaling"),
        *("num_nextn_predict_layers", "mtp_hybrid_override_pattern", "mtp_layers_block_type"),
        # Without experts those of experts have no effect.
        *("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "norm_topk_prob"),
        *("moe_intermediate_size", "moe_shared_expert_intermediate_size", "n_group"),
        *("routed_scaling_factor", "topk_group", "num_local_experts"),
        # Without Mamba layers so have those.
        *("conv_kernel", "time_step_limit"),
    ),
    values={
        "position_embedding_type": "none",
        "gated_linear_unit": False,
        "activation": "squared_relu",
    },
    common=_nemotron_sizes,
)

HYBRID_FAMILIES: Mapping[str, Family] = {
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5": _qwen3_5("Qwen3_5ForConditionalGeneration", _dense_layers, multimodal=True),
    "qwen3_5_text": _qwen3_5("Qwen3_5ForCausalLM", _dense_layers, multimodal=False),
    "qwen3_5_moe": _qwen3_5("Qwen3_5MoeForConditionalGeneration", _expert_layers, multimodal=True),
    "qwen3_5_moe_text": _qwen3_5("Qwen3_5MoeForCausalLM", _expert_layers, multimodal=False),
    "nemotron_h": _NEMOTRON_H,
}
"""Families by `model_type`."""
REFUSED: Mapping[str, str] = {
    "falcon_h1": "its layers run attention and Mamba side by side, which no layer of "
    "Megatron-Core's HybridModel does",
    "granitemoehybrid": "it multiplies embeddings, the output of each layer, attention scores and "
    "logits by factors (residual_multiplier, ...), and Megatron-Core's layers have none",
    "kimi_linear": "its linear attention is KDA, of which Megatron-Core has no layer",
}
"""Hybrid families that Megatron-Core cannot express, with the reason."""
