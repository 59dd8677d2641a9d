"""FLOPs of tokens and of squared tokens, from the model sizes in a host's Megatron arguments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megapack.cost.sizes import ModelSizes

_NEEDED = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "vocab_size")


def model_flops(args: Any) -> tuple[float, float] | None:
    """Forward FLOPs per token, and per squared token of a sample; None without the model's sizes.

    Args:
        args: Megatron's argument namespace. Reads `num_layers`, `hidden_size`, `ffn_hidden_size`,
            `num_attention_heads` and `vocab_size`; if present, also `num_query_groups`,
            `kv_channels`, `swiglu`, `num_experts` with `moe_*`, and the head widths of multi-latent
            attention.
    """
    if any(getattr(args, name, None) is None for name in _NEEDED):
        return None
    dense = ModelSizes(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        vocab_size=args.vocab_size,
        num_query_groups=getattr(args, "num_query_groups", None),
        kv_channels=_head_width(args),
        gated_linear_unit=getattr(args, "swiglu", True),
    )
    num_moe = _num_moe_layers(args)
    per_token = dense.head_flops_per_token()
    per_token += (args.num_layers - num_moe) * dense.last_kind.layer_flops_per_token()
    if num_moe:
        experts = replace(
            dense,
            moe_ffn_hidden_size=getattr(args, "moe_ffn_hidden_size", None),
            num_experts=args.num_experts,
            moe_top_k=getattr(args, "moe_router_topk", 1),
            moe_shared_ffn_hidden_size=getattr(args, "moe_shared_expert_intermediate_size", None),
            moe_latent_size=getattr(args, "moe_latent_size", None),
        )
        per_token += num_moe * experts.last_kind.layer_flops_per_token()
    return per_token, args.num_layers * dense.last_kind.layer_flops_per_token_sq()


def _head_width(args: Any) -> int | None:
    if getattr(args, "multi_latent_attention", False):
        # Scores and values have different widths; `kv_channels` is one width, their mean.
        keys = int(args.qk_head_dim + args.qk_pos_emb_head_dim)
        return (keys + int(args.v_head_dim)) // 2
    return getattr(args, "kv_channels", None)


def _num_moe_layers(args: Any) -> int:
    if getattr(args, "num_experts", None) is None:
        return 0
    frequency = getattr(args, "moe_layer_freq", 1)
    if isinstance(frequency, int):
        return len(range(0, args.num_layers, frequency))
    return sum(1 for layer in frequency if layer > 0)
