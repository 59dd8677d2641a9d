"""What the sizes of a model must fulfil on a layout."""

from __future__ import annotations

from megapack.cost.sizes import VOCAB_MULTIPLE
from megapack.errors import ConfigError
from megapack.job.config.model import ModelConfig
from megapack.job.config.sections import TrainConfig
from megapack.layout import Layout
from megapack.policy import check_policy


def checked_layout(config: TrainConfig, world_size: int) -> Layout:
    """The layout of a job on this many ranks, once all has been checked that the config alone says.

    Raises:
        ConfigError: the layout does not fit the number of ranks or the model, or
            count_rule="per_rank" is on ranks that meet in every micro-batch.
    """
    layout = config.layout.to_layout(world_size, config.model.fp8_rows)
    check_sizes(config.model, layout)
    if config.critic.hf_path is not None:
        check_sizes(config.critic_model, layout)
    shares_scales = config.model.fp8 == "delayed"
    check_policy(config.plan, layout, config.plan.micro_batch_size, shares_fp8_scales=shares_scales)
    return layout


def check_sizes(model: ModelConfig, layout: Layout) -> None:
    """Raise ConfigError for the first size of a model that the layout cannot split evenly."""
    heads = model.num_attention_heads
    groups = model.num_query_groups or heads
    _, global_groups = model.global_heads
    if model.kv_lora_rank is not None and layout.tp > 1 and not layout.sequence_parallel:
        raise ConfigError(
            f"multi-latent attention (model.kv_lora_rank={model.kv_lora_rank}) with layout.tp="
            f"{layout.tp} needs layout.sequence_parallel=true, because Megatron-Core sums the "
            "gradients of the shared rotated keys only with it; set it"
        )
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
    checks = {
        f"model.num_attention_heads={heads}": (heads, "tp", layout.tp),
        f"model.num_query_groups={groups}": (groups, "tp", layout.tp),
        f"model.global_query_groups={global_groups}": (global_groups, "tp", layout.tp),
        **_dense_widths(model, layout),
        **_expert_widths(model, layout),
    }
    for what, (size, key, ranks) in checks.items():
        if size % ranks:
            raise ConfigError(
                f"{what} does not divide by layout.{key}={ranks}; set layout.{key} to a divisor of "
                f"{size}"
            )
    for what, (size, unit) in _fp8_widths(model, layout).items():
        if size % unit:
            raise ConfigError(
                f"{what} is no multiple of {unit}; change it or the layout, or set model.fp8=null"
            )


def _dense_widths(model: ModelConfig, layout: Layout) -> dict[str, tuple[int, str, int]]:
    """Widths of dense and shared MLPs, each with the ranks over which it is split."""
    widths: dict[str, tuple[int, str, int]] = {}
    if any(model.dense_layers):
        dense = model.ffn_hidden_size or 4 * model.hidden_size
        widths[f"the dense layers' width {dense}"] = (dense, "tp", layout.tp)
    shared = model.moe_shared_ffn_hidden_size
    if shared is not None:
        widths[f"model.moe_shared_ffn_hidden_size={shared}"] = (shared, "tp", layout.tp)
    return widths


def _expert_widths(model: ModelConfig, layout: Layout) -> dict[str, tuple[int, str, int]]:
    """Sizes of the experts, each with the ranks over which it is split."""
    if model.num_experts is None:
        return {}
    width = model.expert_ffn_hidden_size
    return {
        f"model.num_experts={model.num_experts}": (model.num_experts, "ep", layout.ep),
        f"the experts' width {width}": (width, "etp", layout.etp),
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
    # Blocks of 128 may be cut short here; products need multiples of 16.
    least = 32 if model.fp8 in ("mxfp8", "nvfp4") else 16
    if model.kv_lora_rank is None:
        channels = (heads + 2 * groups) * model.head_width
        widths["(num_attention_heads + 2 * num_query_groups) * head width"] = (
            channels,
            least * layout.tp,
        )
    if model.has_global_heads:
        width, groups = model.global_heads
        widths["num_attention_heads * global_kv_channels"] = (heads * width, unit)
        widths["global_query_groups * global_kv_channels"] = (groups * width, least * layout.tp)
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
