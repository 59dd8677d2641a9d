"""Multi-latent attention with Megatron's local layers.

Megatron's layer expects Transformer Engine's projections, which keep the two down projections whole
on every tensor-parallel rank. Local ones are split and their results gathered; the gradient of the
rotated keys, which all heads share, is then that of the rank's own heads alone. Here they are whole
in both cases.

With sequence parallelism each rank projects its own tokens, and Megatron sums the gradients of the
marked weights over the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.extensions import transformer_engine
from megatron.core.tensor_parallel.layers import (
    linear_with_frozen_weight,
    linear_with_grad_accumulation_and_async_allreduce,
)
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from megapack.model.sharded import Sharded

if not transformer_engine.HAVE_TE:
    # Megatron-Core 0.16.1 takes the import of its wrappers for Transformer Engine itself.
    multi_latent_attention.HAVE_TE = False


def close_gaps(chunks: Sequence[Any]) -> None:
    """Let multi-latent attention project whole tensors.

    The latent of keys is a slice of the down projection, which a norm copies. Without
    `qk_layernorm` the slice itself reaches Megatron's column-parallel projection, which gathers it
    from tensor-parallel ranks under sequence parallelism, and NCCL takes no tensor with gaps.
    Idempotent.
    """
    for module in (module for chunk in chunks for module in chunk.modules()):
        if isinstance(module, MLASelfAttention):
            projection = module.linear_kv_up_proj
            if _close_gap not in projection._forward_pre_hooks.values():
                projection.register_forward_pre_hook(_close_gap)


def _close_gap(module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return inputs[0].contiguous(), *inputs[1:]


class PlainQueries(MLASelfAttention):  # type: ignore[misc]
    """Megatron's multi-latent self attention in which queries that are not compressed have no norm.

    Since 0.19 Megatron-Core gives them one, of the hidden states once more, wherever compressed
    keys have one. DeepSeek-V2-Lite and Moonlight have norms of keys alone.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> Any:
        if self.config.q_lora_rank is not None:
            return super()._resolve_qk_norm_config(submodules)
        names = ("linear_q_proj", "linear_kv_up_proj", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}


class LatentAttention(PlainQueries):
    """Megatron's multi-latent self attention with whole down projections."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        rank = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = WholeLinear(config, rank)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = WholeLinear(config, config.q_lora_rank)


class WholeLinear(Sharded, torch.nn.Linear):
    """A projection that every tensor-parallel rank has whole, of hidden states or a latent.

    Weights are allocated and not drawn; see `gpt.init`.
    """

    def __init__(self, config: Any, out_features: int, in_features: int | None = None) -> None:
        super().__init__(
            in_features or config.hidden_size, out_features, bias=False, dtype=config.params_dtype
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, input: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """The product, and no bias.

        By Megatron's function, so that its backward can be split (`model.weight_gradients`).
        """
        linear = linear_with_grad_accumulation_and_async_allreduce
        if not self.weight.requires_grad:
            linear = linear_with_frozen_weight
        product = linear(
            input,
            self.weight,
            None,
            gradient_accumulation_fusion=False,
            allreduce_dgrad=False,
            sequence_parallel=False,
            tp_group=None,
        )
        return product, None
