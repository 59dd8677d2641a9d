"""What the sizes of a model must fulfil on a layout."""

from __future__ import annotations

from megapack.cost.sizes import VOCAB_MULTIPLE
from megapack.errors import ConfigError
from megapack.job.config.model import ModelConfig
from megapack.layout import Layout, ParallelSizes


def check_sizes(model: ModelConfig, layout: Layout) -> None:
    """Raise ConfigError for the first size of a model that the layout cannot split evenly."""
    check_division(model, layout)
    if model.linear_bias and model.num_experts is not None and layout.etp > 1:
        raise ConfigError(
            f"model.linear_bias=true with layout.etp={layout.etp}: each rank that holds a part of "
            "an expert would add its whole bias; set layout.etp=1"
        )
    if VOCAB_MULTIPLE % layout.tp:
        raise ConfigError(
            f"layout.tp={layout.tp} does not divide the padded vocabulary, a multiple of "
            f"{VOCAB_MULTIPLE}; set layout.tp to a power of two"
        )
    for what, (size, unit) in _fp8_widths(model, layout).items():
        if size % unit:
            raise ConfigError(
                f"{what} is no multiple of {unit}; change it or the layout, or set model.fp8=null"
            )


def check_division(model: ModelConfig, layout: ParallelSizes) -> None:
    """Raise ConfigError for the first size that the groups of a layout do not divide, or if they
    need sequence parallelism.

    Args:
        layout: may have no dp yet.
    """
    ranks = {"tp": layout.tp, "ep": layout.ep, "etp": layout.etp or layout.tp}
    for what, (size, by) in model.divided().items():
        if size % ranks[by]:
            raise ConfigError(
                f"{what} does not divide over layout.{by}={ranks[by]}; set a multiple of "
                f"{ranks[by]}, or layout.{by} to a divisor of {size}"
            )
    if layout.tp == 1 or layout.sequence_parallel:
        return
    needed = f"with layout.tp={layout.tp} needs layout.sequence_parallel=true, because"
    if model.num_experts:
        raise ConfigError(
            f"model.num_experts={model.num_experts} {needed} Megatron routes each token on one "
            "rank; set it"
        )
    if model.uses_mla:
        raise ConfigError(
            f"model.kv_lora_rank={model.kv_lora_rank} {needed} "
            "Megatron-Core sums the gradients of the shared rotated keys only with it; set it"
        )


def _fp8_widths(model: ModelConfig, layout: Layout) -> dict[str, tuple[int, int]]:
    """Widths of the FP8 matrix products, each with the number that it must be a multiple of."""
    if model.fp8 is None:
        return {}
    whole, heads, latent = layout.fp8_unit_tokens, model.num_attention_heads, model.kv_lora_rank
    # Blocks of 128 may be cut short in products of queries, keys and values, which need 16.
    least = 32 if model.fp8 in ("mxfp8", "nvfp4") else 16
    unit, short, of_experts = whole * layout.tp, least * layout.tp, whole * layout.etp
    width, groups = model.head_width, model.query_groups
    global_width, global_groups = model.global_heads if model.has_global_heads else (0, 0)
    keys = latent + (model.qk_rope_head_dim or 0) if latent else 0
    # Name -> width, and what it is a multiple of; 0 = the model does not have it.
    widths = {
        "hidden_size": (model.hidden_size, whole),
        "num_attention_heads * head width": (heads * width, unit),
        "(num_attention_heads + 2 * num_query_groups) * head width": (
            0 if latent else (heads + 2 * groups) * width,
            short,
        ),
        "num_attention_heads * global_kv_channels": (heads * global_width, unit),
        "global_query_groups * global_kv_channels": (global_groups * global_width, short),
        "kv_lora_rank + qk_rope_head_dim": (keys, whole),
        "q_lora_rank": (model.q_lora_rank or 0, whole),
        "num_attention_heads * v_head_dim": (heads * (model.v_head_dim or 0), unit),
        "moe_ffn_hidden_size": (model.expert_width if model.num_experts else 0, of_experts),
        "moe_latent_size": (model.moe_latent_size or 0, whole),
        "moe_shared_ffn_hidden_size": (model.moe_shared_ffn_hidden_size or 0, unit),
        "ffn_hidden_size": (model.dense_width if "-" in model.mlp_letters else 0, unit),
    }
    sizes = f"(model.fp8={model.fp8}, tp={layout.tp}, etp={layout.etp})"
    return {f"model.{name}={size} {sizes}": (size, by) for name, (size, by) in widths.items()}
