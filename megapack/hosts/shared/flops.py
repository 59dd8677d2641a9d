"""FLOPs of tokens and of squared tokens, from the model sizes in a host's Megatron arguments."""

from __future__ import annotations

from typing import Any

from megapack.cost.options import AS_ATTENTION, NEEDED
from megapack.cost.sizes import ModelSizes
from megapack.errors import ConfigError

_RECURRENT = (
    *(*NEEDED["G"], *NEEDED["M"], "linear_conv_kernel_dim"),
    *("mamba_head_dim", "mamba_state_dim", "mamba_num_groups"),
)
_NEEDED = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "vocab_size")


def model_flops(args: Any) -> tuple[float, float] | None:
    """Forward FLOPs per token, and per squared token of a sample; None without the model's sizes.

    Args:
        args: Megatron's argument namespace. Reads `num_layers`, `hidden_size`, `ffn_hidden_size`,
            `num_attention_heads` and `vocab_size`; if present, also `num_query_groups`,
            `kv_channels`, `swiglu`, `num_experts` with `moe_*`, the head widths of multi-latent
            attention, and a HybridModel's pattern with the sizes of its recurrent layers.
    """
    if any(getattr(args, name, None) is None for name in _NEEDED):
        return None
    letters = _letters(args)
    given = {name: getattr(args, name, None) for name in _RECURRENT}
    if "M" in letters and given["mamba_num_heads"] is None:
        # As Megatron has them.
        given["mamba_num_heads"] = 2 * args.hidden_size // (given["mamba_head_dim"] or 64)
    try:
        sizes = ModelSizes(
            num_layers=len(letters),
            hybrid_layer_pattern=letters,
            hidden_size=args.hidden_size,
            ffn_hidden_size=args.ffn_hidden_size,
            num_attention_heads=args.num_attention_heads,
            vocab_size=args.vocab_size,
            num_query_groups=getattr(args, "num_query_groups", None),
            kv_channels=_head_width(args),
            gated_linear_unit=getattr(args, "swiglu", True),
            moe_ffn_hidden_size=getattr(args, "moe_ffn_hidden_size", None),
            num_experts=getattr(args, "num_experts", None),
            moe_top_k=getattr(args, "moe_router_topk", 1),
            moe_shared_ffn_hidden_size=getattr(args, "moe_shared_expert_intermediate_size", None),
            moe_latent_size=getattr(args, "moe_latent_size", None),
            **{name: value for name, value in given.items() if value is not None},
        )
    except ConfigError:
        # A letter or a size that is not known.
        return None
    kinds = list(sizes.layer_kinds())
    per_token = sum(count * kind.layer_flops_per_token() for kind, count in kinds)
    per_token_sq = sum(count * kind.layer_flops_per_token_sq() for kind, count in kinds)
    return sizes.head_flops_per_token() + per_token, per_token_sq


def _letters(args: Any) -> str:
    """The layers as those of a HybridModel: each attention, a recurrent layer or an MLP."""
    pattern: str | None = getattr(args, "hybrid_layer_pattern", None)
    if pattern:
        return pattern.partition("/")[0].replace("|", "").translate(AS_ATTENTION)
    frequency = getattr(args, "moe_layer_freq", 1)
    if getattr(args, "num_experts", None) is None:
        frequency = [0] * args.num_layers
    elif isinstance(frequency, int):
        frequency = [int(layer % frequency == 0) for layer in range(args.num_layers)]
    return "".join("*E" if layer > 0 else "*-" for layer in frequency)


def _head_width(args: Any) -> int | None:
    if getattr(args, "multi_latent_attention", False):
        # Scores and values have different widths; `kv_channels` is one width, their mean.
        keys = int(args.qk_head_dim + args.qk_pos_emb_head_dim)
        return (keys + int(args.v_head_dim)) // 2
    return getattr(args, "kv_channels", None)
