"""Megatron-LM's models on packed rows: attention and routers that know a row's samples."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Literal

from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.router import TopKRouter

from megapack.errors import ConfigError
from megapack.model.attention.choice import obstacle
from megapack.model.attention.packed import PackedAttention
from megapack.model.attention.sdpa import PackedSDPA
from megapack.model.attention.varlen import PackedVarlen
from megapack.model.experts.router import PackedRouter
from megapack.model.head import unwrapped

logger = logging.getLogger(__name__)

AuxLoss = Literal["as_set", "per_sequence"]
"""The load-balancing loss of experts: the one of the config, or that of each sample by itself."""

_DEPENDS_ON_PACKING = ("aux_loss", "global_aux_loss")


def use_packed_parts(chunks: Sequence[Any], aux_loss: AuxLoss) -> None:
    """Replace what cannot run packed rows in chunks that Megatron-LM built; weights stay.

    The local spec's `DotProductAttention` becomes a kernel for packed rows, `TopKRouter` becomes
    `PackedRouter`. Transformer Engine's attention runs packed rows itself.

    Raises:
        ConfigError: the model has a setting that packed kernels do not support.
    """
    modules = [module for chunk in chunks for module in unwrapped(chunk).modules()]
    for module in modules:
        if type(module) is SelfAttention and type(module.core_attention) is DotProductAttention:
            module.core_attention = _packed_attention(module.core_attention)
        if type(module) is TopKRouter:
            PackedRouter.adopt(module)
    if aux_loss == "per_sequence":
        _balance_each_sample(modules)


def _packed_attention(core: Any) -> PackedAttention:
    config = core.config
    has_varlen = obstacle("varlen", "bf16" if config.bf16 else "fp32") is None
    kernel = PackedVarlen if has_varlen else PackedSDPA
    # Query-key layer scaling divides by the layer's number here and multiplies in the softmax.
    scaling = core.layer_number if config.apply_query_key_layer_scaling else 1
    packed = kernel(
        config,
        core.layer_number,
        core.attn_mask_type,
        core.attention_type,
        attention_dropout=core.attention_dropout.p,
        softmax_scale=core.softmax_scale * scaling,
        pg_collection=core.pg_collection,
    )
    packed.train(core.training)
    return packed


def _balance_each_sample(modules: Sequence[Any]) -> None:
    """Set seq_aux_loss for aux_loss, in the configs of all chunks and in their routers."""
    # Chunks may share a config or have one each.
    configs = {id(module.config): module.config for module in modules if hasattr(module, "config")}
    for config in configs.values():
        config.moe_router_load_balancing_type = per_sequence(config.moe_router_load_balancing_type)
    for module in modules:
        if isinstance(module, TopKRouter):
            module.routing_type = module.config.moe_router_load_balancing_type


def per_sequence(kinds: str | list[str]) -> str | list[str]:
    """`moe_router_load_balancing_type` with a loss per sample in place of one per micro-batch.

    >>> per_sequence("aux_loss")
    'seq_aux_loss'

    Raises:
        ConfigError: two losses would become the same one.
    """
    if isinstance(kinds, str):
        return "seq_aux_loss" if kinds in _DEPENDS_ON_PACKING else kinds
    changed = [str(per_sequence(kind)) for kind in kinds]
    if len(set(changed)) < len(changed):
        raise ConfigError(
            f"moe_router_load_balancing_type={kinds} with aux_loss='per_sequence' gives {changed}; "
            "keep one of them, with the sum of their coefficients"
        )
    return changed
