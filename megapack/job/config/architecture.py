"""What the keys of an architecture must fulfil together: experts, attention, norms, activations."""

from __future__ import annotations

from typing import Any

from megapack.config.bounds import at_least
from megapack.errors import ConfigError


def check_architecture(model: Any) -> None:
    """Raise ConfigError for the first keys of a `ModelConfig` that contradict each other."""
    _check_experts(model)
    _check_routing(model)
    _check_latent_attention(model)
    _check_indexer(model)
    _check_rope(model)
    _check_global_heads(model)
    _check_norms(model)
    _check_caps(model)
    _check_windows(model)
    _check_activation(model)


def _check_experts(model: Any) -> None:
    coefficients = ("moe_balance_loss_coef", "moe_z_loss_coef", "moe_bias_update_rate")
    at_least(model, "model", 1, "num_experts", "moe_top_k", "moe_ffn_hidden_size")
    at_least(model, "model", 0, *coefficients)
    if model.num_experts is not None and model.moe_top_k > model.num_experts:
        raise ConfigError(
            f"model.moe_top_k={model.moe_top_k} is above model.num_experts={model.num_experts}; "
            f"set {model.num_experts} or less"
        )
    at_least(model, "model", 0, "moe_first_dense_layers")
    at_least(model, "model", 1, "moe_shared_ffn_hidden_size")
    if model.num_experts is None:
        parts = ("moe_first_dense_layers", "moe_shared_ffn_hidden_size", "moe_num_groups")
        for name in (*parts, "moe_expert_bias", "moe_bias_update_rate"):
            if getattr(model, name):
                raise ConfigError(
                    f"model.{name}={getattr(model, name)} needs experts; set model.num_experts, "
                    f"or leave {name} out"
                )
    elif model.moe_first_dense_layers >= model.num_layers:
        raise ConfigError(
            f"model.moe_first_dense_layers={model.moe_first_dense_layers} leaves no layer of "
            f"model.num_layers={model.num_layers} with experts; set less, or num_experts=null"
        )
    if model.moe_shared_gate and model.moe_shared_ffn_hidden_size is None:
        raise ConfigError(
            "model.moe_shared_gate=true without a shared expert; set "
            "model.moe_shared_ffn_hidden_size, or moe_shared_gate=false"
        )
    if model.linear_bias and model.moe_shared_ffn_hidden_size is not None:
        raise ConfigError(
            f"model.linear_bias=true with model.moe_shared_ffn_hidden_size="
            f"{model.moe_shared_ffn_hidden_size}: Megatron-Core's shared experts have no biases; "
            "leave one out"
        )


def _check_routing(model: Any) -> None:
    """Check the groups of experts and the scores of those that are chosen."""
    at_least(model, "model", 1, "moe_num_groups", "moe_group_top_k", "moe_group_best")
    if model.moe_route_scale is not None and not model.moe_route_scale > 0:
        raise ConfigError(
            f"model.moe_route_scale is {model.moe_route_scale}; set a number above 0, or null"
        )
    if not model.moe_norm_top_k and model.moe_score_function == "sigmoid":
        raise ConfigError(
            "model.moe_norm_top_k=false needs model.moe_score_function=softmax: Megatron-Core "
            "always normalises sigmoids; set one of them otherwise"
        )
    groups = model.moe_num_groups
    chosen = model.moe_group_top_k
    best = model.moe_group_best
    if groups is None and best is not None:
        raise ConfigError(
            f"model.moe_group_best={best} needs groups of experts; set model.moe_num_groups, or "
            "leave it out"
        )
    if groups is None and chosen is None:
        return
    if groups is None or chosen is None:
        raise ConfigError(
            f"model.moe_num_groups={groups} and model.moe_group_top_k={chosen}; set both, or "
            "neither"
        )
    experts = model.num_experts or 0
    if experts % groups or chosen > groups:
        raise ConfigError(
            f"model.moe_num_groups={groups} with model.num_experts={experts} and "
            f"model.moe_group_top_k={chosen}; set a divisor of {experts} that is at least "
            f"{chosen}"
        )
    size = experts // groups
    if best is not None and best > size:
        raise ConfigError(
            f"model.moe_group_best={best} is above the {size} experts of a group; set {size} or "
            "less"
        )
    if (best is None and model.moe_top_k % chosen) or model.moe_top_k > chosen * size:
        raise ConfigError(
            f"model.moe_top_k={model.moe_top_k} is not a multiple of model.moe_group_top_k="
            f"{chosen} of at most {chosen * size}; set one"
        )


def _check_latent_attention(model: Any) -> None:
    widths = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    names = ("q_lora_rank", *widths, "latent_norm_epsilon")
    at_least(model, "model", 1, "kv_lora_rank", "q_lora_rank", *widths)
    at_least(model, "model", 0, "latent_norm_epsilon")
    if model.kv_lora_rank is None:
        for name in names:
            if getattr(model, name) is not None:
                raise ConfigError(
                    f"model.{name}={getattr(model, name)} needs model.kv_lora_rank; set it for "
                    f"multi-latent attention, or {name}=null"
                )
        return
    for name in widths:
        if getattr(model, name) is None:
            raise ConfigError(f"model.kv_lora_rank is set, so model.{name} must be; set it")
    refused = {
        f"rope_scaling.kind={model.rope_scaling.kind}": model.rope_scaling.kind
        not in ("none", "yarn"),
        f"local_rotary_base={model.local_rotary_base}": model.local_rotary_base is not None,
        f"kv_channels={model.kv_channels}": model.kv_channels is not None,
        f"num_query_groups={model.num_query_groups}": model.num_query_groups
        not in (None, model.num_attention_heads),
        "qkv_bias=true": model.qkv_bias,
        f"rotary_percent={model.rotary_percent}": model.rotary_percent != 1,
        "rotary_interleaved=true": model.rotary_interleaved,
        f"qk_rope_head_dim={model.qk_rope_head_dim}": (model.qk_rope_head_dim or 0) % 2 == 1,
    }
    for key, is_set in refused.items():
        if is_set:
            raise ConfigError(
                f"model.{key} does not run with multi-latent attention (model.kv_lora_rank="
                f"{model.kv_lora_rank}); leave it out"
            )


def _check_indexer(model: Any) -> None:
    sizes = ("indexer_top_k", "indexer_num_heads", "indexer_head_dim")
    at_least(model, "model", 1, *sizes)
    at_least(model, "model", 0, "indexer_loss_coef")
    given = [name for name in sizes if getattr(model, name) is not None]
    if not given:
        for name in ("indexer_loss_coef", "indexer_rope_interleaved"):
            if getattr(model, name):
                raise ConfigError(
                    f"model.{name}={getattr(model, name)} needs an indexer; set "
                    f"model.indexer_top_k, or leave {name} out"
                )
        return
    for name in (*sizes, "q_lora_rank"):
        if getattr(model, name) is None:
            raise ConfigError(
                f"model.{given[0]}={getattr(model, given[0])} without model.{name}; set it too, or "
                "leave out the keys of the indexer"
            )
    if (model.indexer_head_dim or 0) < (model.qk_rope_head_dim or 0):
        raise ConfigError(
            f"model.indexer_head_dim={model.indexer_head_dim} is below model.qk_rope_head_dim="
            f"{model.qk_rope_head_dim}, the channels that are rotated; set at least that"
        )
    refused = {
        "attention": (model.attention in ("te", "varlen"), "it has no sparse attention; set auto"),
        "qk_layernorm": (not model.qk_layernorm, "the indexer reads normalised latents; set true"),
        "megatron_class": (
            model.layer_pattern is not None,
            "layers of a HybridModel have no indexer here; set gpt",
        ),
        "mtp_num_layers": (
            model.mtp_num_layers > 0,
            "layers of multi-token prediction have no indexer here; set 0",
        ),
    }
    for name, (is_refused, why) in refused.items():
        if is_refused:
            raise ConfigError(
                f"model.{name}={getattr(model, name)} with model.indexer_top_k="
                f"{model.indexer_top_k}: {why}"
            )


def _check_rope(model: Any) -> None:
    """Check the layers with a local rotary embedding, and the numbers of LongRoPE."""
    pattern = model.rotary_pattern
    if (pattern is None) is not (model.local_rotary_base is None):
        raise ConfigError(
            f"model.rotary_pattern={pattern} and model.local_rotary_base="
            f"{model.local_rotary_base}; set both, or neither"
        )
    if pattern is not None:
        _check_letters("rotary_pattern", pattern)
        setting = f"model.rotary_pattern={pattern} does not run"
        _refuse(model, setting, "hybrid", "mtp", "longrope")
    if model.rotary_interleaved and (pattern or model.rope_scaling.depends_on_length):
        raise ConfigError(
            "model.rotary_interleaved=true does not run with several rotary embeddings "
            "(rotary_pattern, rope_scaling.kind=longrope); set false"
        )
    pairs = int(model.head_width * model.rotary_percent) // 2
    count = len(model.rope_scaling.short_factor)
    if model.rope_scaling.kind == "longrope" and count != pairs:
        raise ConfigError(
            f"model.rope_scaling has {count} numbers in short_factor for {pairs} pairs of rotated "
            f"channels; set {pairs}"
        )


def _check_global_heads(model: Any) -> None:
    """Check what only global layers have, and what is computed in values of attention."""
    keys = ("global_kv_channels", "global_query_groups", "global_keys_as_values")
    given = [name for name in keys if getattr(model, name)]
    if given and model.rotary_pattern is None:
        raise ConfigError(
            f"model.{given[0]}={getattr(model, given[0])} without model.rotary_pattern, which says "
            "what layers are global; set it, or leave the key out"
        )
    for name in (*given, *(["value_layernorm"] if model.value_layernorm else [])):
        _refuse(
            model, f"model.{name}={getattr(model, name)} does not run", "hybrid", "latent", "mtp"
        )
    if model.global_keys_as_values and (model.qkv_bias or model.linear_bias):
        raise ConfigError(
            "model.global_keys_as_values=true does not run with qkv_bias or linear_bias; leave one "
            "out"
        )
    if given and (model.qk_layernorm_over_heads or model.qk_layernorm_after_rotation):
        raise ConfigError(
            f"model.{given[0]}={getattr(model, given[0])} does not run with "
            "qk_layernorm_over_heads or qk_layernorm_after_rotation; leave one out"
        )


def _check_norms(model: Any) -> None:
    if model.attention_scale is not None and not model.attention_scale > 0:
        raise ConfigError(
            f"model.attention_scale is {model.attention_scale}; set a number above 0, or null"
        )
    after = model.qk_layernorm_after_rotation
    if after and (not model.qk_layernorm or model.qk_layernorm_over_heads):
        raise ConfigError(
            "model.qk_layernorm_after_rotation=true needs qk_layernorm=true and "
            "qk_layernorm_over_heads=false; set them, or leave it out"
        )
    if after:
        _refuse(model, "model.qk_layernorm_after_rotation=true does not run", "hybrid", "latent")
    if model.qk_layernorm_over_heads and (
        not model.qk_layernorm
        or model.kv_lora_rank is not None
        or model.layernorm_zero_centered_gamma
        or model.normalization != "RMSNorm"
    ):
        raise ConfigError(
            "model.qk_layernorm_over_heads=true needs qk_layernorm=true, normalization=RMSNorm, "
            "layernorm_zero_centered_gamma=false and no multi-latent attention; set them, or leave "
            "it out"
        )
    has_inner = model.moe_inner_norms
    if has_inner and (
        model.norm_placement != "sandwich"
        or model.moe_shared_ffn_hidden_size is None
        or model.moe_shared_gate
        or model.moe_first_dense_layers
        or model.moe_score_function != "softmax"
        or model.has_expert_bias
        or model.layernorm_zero_centered_gamma
    ):
        raise ConfigError(
            "model.moe_inner_norms=true needs norm_placement=sandwich, "
            "layernorm_zero_centered_gamma=false and experts in every layer, with a shared expert "
            "without a gate, softmax scores and no expert bias; set them, or leave it out"
        )
    if model.norm_placement == "pre":
        if model.layer_scalars:
            raise ConfigError(
                "model.layer_scalars=true needs model.norm_placement=post or sandwich; set one"
            )
        return
    setting = f"model.norm_placement={model.norm_placement} does not run"
    others = ("mtp", "hybrid", "latent") if has_inner else ("experts", "mtp", "hybrid", "latent")
    _refuse(model, setting, *others, advice="set pre")


def _check_caps(model: Any) -> None:
    for name in ("attention_score_cap", "logit_cap"):
        cap = getattr(model, name)
        if cap is not None and not cap > 0:
            raise ConfigError(f"model.{name} is {cap}; set a number above 0, or null")
    cap = model.attention_score_cap
    if cap is None:
        return
    if model.attention_sinks or model.attention == "varlen":
        raise ConfigError(
            f"model.attention_score_cap={cap} does not run with attention={model.attention} and "
            f"attention_sinks={str(model.attention_sinks).lower()}: no fused kernel caps scores; "
            "set attention=auto and attention_sinks=false"
        )
    _refuse(model, f"model.attention_score_cap={cap} does not run", "hybrid", "latent")


def _check_windows(model: Any) -> None:
    at_least(model, "model", 1, "attention_window")
    pattern = model.attention_window_pattern
    if pattern is not None and model.attention_window is None:
        raise ConfigError(
            f"model.attention_window_pattern={pattern} without a window; set "
            "model.attention_window, or attention_window_pattern=null"
        )
    if pattern is not None:
        _check_letters("attention_window_pattern", pattern)
    if model.attention_window is None and not model.attention_sinks:
        return
    # Megatron numbers layers anew within a depth of multi-token prediction, and letters of a
    # pattern are layers.
    setting = (
        f"model.attention_window={model.attention_window} and model.attention_sinks="
        f"{str(model.attention_sinks).lower()} do not run"
    )
    _refuse(model, setting, "mtp", "hybrid", "latent")


def _check_activation(model: Any) -> None:
    limit = model.activation_clamp
    if limit is not None and not limit > 0:
        raise ConfigError(f"model.activation_clamp is {limit}; set a number above 0, or null")
    if (limit is not None or model.glu_linear_offset) and model.activation != "quick_gelu":
        raise ConfigError(
            f"model.activation_clamp={limit} and model.glu_linear_offset={model.glu_linear_offset} "
            "need model.activation=quick_gelu; set it, or null and 0"
        )
    if model.linear_bias:
        _refuse(model, "model.linear_bias=true does not run", "hybrid", "latent", "fp8")


def _check_letters(name: str, pattern: str) -> None:
    if not pattern or set(pattern) - {"L", "G"}:
        raise ConfigError(f"model.{name} is {pattern!r}; set letters L and G, such as LG")


def _refuse(model: Any, setting: str, *others: str, advice: str = "leave one out") -> None:
    """Raise ConfigError if the model has one of the parts that a setting does not run with.

    Args:
        setting: the key and its value, with the verb.
        others: the parts.
    """
    parts = {
        "experts": (f"num_experts={model.num_experts}", model.num_experts is not None),
        "fp8": (f"fp8={model.fp8}", model.fp8 is not None),
        "hybrid": (
            "a HybridModel (megatron_class, hybrid_layer_pattern)",
            model.layer_pattern is not None,
        ),
        "latent": ("multi-latent attention (kv_lora_rank)", model.kv_lora_rank is not None),
        "longrope": ("rope_scaling.kind=longrope", model.rope_scaling.kind == "longrope"),
        "mtp": (f"mtp_num_layers={model.mtp_num_layers}", model.mtp_num_layers > 0),
    }
    for name, is_set in map(parts.__getitem__, others):
        if is_set:
            raise ConfigError(f"{setting} with {name}; {advice}")
