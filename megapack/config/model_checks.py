"""Checks of the model's keys: experts, routing, multi-latent attention, and sizes over a layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megapack.cost.sizes import VOCAB_MULTIPLE
from megapack.errors import ConfigError
from megapack.layout import Layout

if TYPE_CHECKING:
    from megapack.config.model import ModelConfig


def at_least(config: Any, section: str, least: float, *names: str) -> None:
    """Raise ConfigError for the first of these fields that is below `least`; None passes."""
    for name in names:
        value = getattr(config, name)
        # Not `value < least`, which is false for NaN.
        if value is not None and not value >= least:
            key = f"{section}.{name}" if section else name
            raise ConfigError(f"{key} is {value}; set {least} or more")


def check_experts(model: ModelConfig) -> None:
    coefficients = ("moe_balance_loss_coef", "moe_z_loss_coef", "moe_bias_update_rate")
    at_least(model, "model", 1, "num_experts", "moe_top_k", "moe_ffn_hidden_size")
    at_least(model, "model", 0, *coefficients)
    if model.num_experts is not None and model.moe_top_k > model.num_experts:
        raise ConfigError(
            f"model.moe_top_k={model.moe_top_k} is above model.num_experts={model.num_experts}; "
            f"set {model.num_experts} or less"
        )
    if model.moe_bias_update_rate and model.moe_score_function != "sigmoid":
        raise ConfigError(
            f"model.moe_bias_update_rate={model.moe_bias_update_rate} needs "
            "model.moe_score_function=sigmoid; set it, or moe_bias_update_rate=0"
        )
    if model.moe_expert_bias and model.moe_score_function != "sigmoid":
        raise ConfigError(
            "model.moe_expert_bias=true needs model.moe_score_function=sigmoid; set it, or "
            "moe_expert_bias=false"
        )
    at_least(model, "model", 0, "moe_first_dense_layers")
    at_least(model, "model", 1, "moe_shared_ffn_hidden_size")
    if model.num_experts is None:
        parts = ("moe_first_dense_layers", "moe_shared_ffn_hidden_size", "moe_num_groups")
        for name in (*parts, "moe_expert_bias"):
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


def check_routing(model: ModelConfig) -> None:
    """Check the groups of experts and the scores of those that are chosen."""
    at_least(model, "model", 1, "moe_num_groups", "moe_group_top_k")
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
    if model.moe_top_k % chosen or model.moe_top_k // chosen > size:
        raise ConfigError(
            f"model.moe_top_k={model.moe_top_k} is not a multiple of model.moe_group_top_k="
            f"{chosen} of at most {chosen * size}; set one"
        )


def check_latent_attention(model: ModelConfig) -> None:
    widths = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    names = ("q_lora_rank", *widths)
    at_least(model, "model", 1, "kv_lora_rank", *names)
    if model.kv_lora_rank is None:
        for name in names:
            if getattr(model, name) is not None:
                raise ConfigError(
                    f"model.{name}={getattr(model, name)} needs model.kv_lora_rank; set it for "
                    f"multi-latent attention, or {name}=null"
                )
        if model.rope_scaling.kind == "yarn":
            raise ConfigError(
                "model.rope_scaling.kind=yarn needs multi-latent attention (model.kv_lora_rank)"
                "; set kind=none, which is exact for samples of the original length"
            )
        return
    for name in widths:
        if getattr(model, name) is None:
            raise ConfigError(f"model.kv_lora_rank is set, so model.{name} must be; set it")
    refused = {
        "rope_scaling.kind=llama3": model.rope_scaling.kind == "llama3",
        f"kv_channels={model.kv_channels}": model.kv_channels is not None,
        f"num_query_groups={model.num_query_groups}": model.num_query_groups
        not in (None, model.num_attention_heads),
        "qkv_bias=true": model.qkv_bias,
        f"rotary_percent={model.rotary_percent}": model.rotary_percent != 1,
        f"qk_rope_head_dim={model.qk_rope_head_dim}": (model.qk_rope_head_dim or 0) % 2 == 1,
        f"mtp_num_layers={model.mtp_num_layers}": model.mtp_num_layers > 0,
    }
    for key, is_set in refused.items():
        if is_set:
            raise ConfigError(
                f"model.{key} does not run with multi-latent attention (model.kv_lora_rank="
                f"{model.kv_lora_rank}); leave it out"
            )


def check_sizes(model: ModelConfig, layout: Layout) -> None:
    """Raise ConfigError for the first size of a model that the layout cannot split evenly."""
    heads = model.num_attention_heads
    groups = model.num_query_groups or heads
    if model.kv_lora_rank is not None and layout.tp > 1 and not layout.sequence_parallel:
        raise ConfigError(
            f"multi-latent attention (model.kv_lora_rank={model.kv_lora_rank}) with layout.tp="
            f"{layout.tp} needs layout.sequence_parallel=true, because Megatron-Core sums the "
            "gradients of the shared rotated keys only with it; set it"
        )
    checks = {
        f"model.num_attention_heads={heads}": (heads, layout.tp),
        f"model.num_query_groups={groups}": (groups, layout.tp),
        "the padded vocabulary (a multiple of 128)": (VOCAB_MULTIPLE, layout.tp),
        **_dense_widths(model, layout),
        **_expert_widths(model, layout),
        **_fp8_widths(model, layout),
    }
    for what, (size, divisor) in checks.items():
        if size % divisor:
            raise ConfigError(f"{what} does not divide by {divisor}; change it or the layout")


def _dense_widths(model: ModelConfig, layout: Layout) -> dict[str, tuple[int, int]]:
    """Widths of dense and shared MLPs, each with the number of ranks over which it is split."""
    widths: dict[str, tuple[int, int]] = {}
    if any(model.dense_layers):
        dense = model.ffn_hidden_size or 4 * model.hidden_size
        widths[f"the dense layers' width {dense}"] = (dense, layout.tp)
    shared = model.moe_shared_ffn_hidden_size
    if shared is not None:
        widths[f"model.moe_shared_ffn_hidden_size={shared}"] = (shared, layout.tp)
    return widths


def _expert_widths(model: ModelConfig, layout: Layout) -> dict[str, tuple[int, int]]:
    """Sizes of the experts, each with the number of ranks over which it is split."""
    if model.num_experts is None:
        return {}
    width = model.expert_ffn_hidden_size
    return {
        f"model.num_experts={model.num_experts} (ep={layout.ep})": (model.num_experts, layout.ep),
        f"the experts' width {width} (etp={layout.etp})": (width, layout.etp),
    }


def _fp8_widths(model: ModelConfig, layout: Layout) -> dict[str, tuple[int, int]]:
    """Widths of the FP8 matrix products, each with the number that it must be a multiple of."""
    if model.fp8 is None:
        return {}
    whole = layout.fp8_unit_tokens
    unit = whole * layout.tp
    heads = model.num_attention_heads
    groups = model.num_query_groups or heads
    widths = {
        "hidden_size": (model.hidden_size, whole),
        "num_attention_heads * head width": (heads * model.head_width, unit),
    }
    if model.kv_lora_rank is None:
        # Blocks of 128 may be cut short here; products need multiples of 16.
        least = 32 if model.fp8 == "mxfp8" else 16
        channels = (heads + 2 * groups) * model.head_width
        widths["(num_attention_heads + 2 * num_query_groups) * head width"] = (
            channels,
            least * layout.tp,
        )
    if model.kv_lora_rank is not None:
        keys = model.kv_lora_rank + (model.qk_rope_head_dim or 0)
        widths["kv_lora_rank + qk_rope_head_dim"] = (keys, whole)
        widths["q_lora_rank"] = (model.q_lora_rank or 0, whole)
        widths["num_attention_heads * v_head_dim"] = (heads * (model.v_head_dim or 0), unit)
    if model.num_experts is not None:
        widths["moe_ffn_hidden_size"] = (model.expert_ffn_hidden_size, whole * layout.etp)
    if model.moe_shared_ffn_hidden_size is not None:
        widths["moe_shared_ffn_hidden_size"] = (model.moe_shared_ffn_hidden_size, unit)
    if any(model.dense_layers):
        widths["ffn_hidden_size"] = (model.ffn_hidden_size or 4 * model.hidden_size, unit)
    return {
        f"model.{name}={size} (model.fp8={model.fp8}, tp={layout.tp}, etp={layout.etp})": (
            size,
            divisor,
        )
        for name, (size, divisor) in widths.items()
    }
