"""Megatron-Core's layer specs with attention for packed rows."""

from __future__ import annotations

from typing import Any, Literal

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)

from megapack.base.choices import Kernel
from megapack.model.attention.sdpa import PackedSDPA
from megapack.model.attention.varlen import PackedVarlen
from megapack.model.experts.router import use_packed_router


class PackedLayerNorm(torch.nn.LayerNorm):
    """torch's LayerNorm for the local spec, with support for sequence parallelism.

    Megatron's own torch norm refuses sequence parallelism. With marked parameters Megatron sums
    their gradients over the tensor-parallel ranks, which see different tokens.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        _mark_sequence_parallel(self, config)


class PackedRMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm for the local spec; see `PackedLayerNorm`."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        _mark_sequence_parallel(self, config)


def _mark_sequence_parallel(norm: torch.nn.Module, config: TransformerConfig) -> None:
    for param in norm.parameters():
        param.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def packed_norm(config: TransformerConfig) -> type[PackedLayerNorm] | type[PackedRMSNorm]:
    """The norm class of a config, for layer specs."""
    return PackedRMSNorm if config.normalization == "RMSNorm" else PackedLayerNorm


def local_layer_spec(
    config: TransformerConfig, attention: Literal["varlen", "sdpa"] = "sdpa"
) -> ModuleSpec:
    """Megatron's local layer spec, with attention in which packed samples do not see each other."""
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )
    parts = spec.submodules.self_attention.submodules
    parts.core_attention = PackedVarlen if attention == "varlen" else PackedSDPA
    if config.num_moe_experts:
        use_packed_router(spec.submodules.mlp)
    norm = packed_norm(config)
    spec.submodules.input_layernorm = norm
    spec.submodules.pre_mlp_layernorm = norm
    if config.qk_layernorm:
        parts.q_layernorm = norm
        parts.k_layernorm = norm
    return spec


def _layer_spec(kernel: Kernel, config: TransformerConfig) -> ModuleSpec:
    """One layer with this attention kernel."""
    if kernel != "te":
        return local_layer_spec(config, kernel)
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
    )
    if config.num_moe_experts:
        use_packed_router(spec.submodules.mlp)
    return spec


def block_spec(kernel: Kernel, config: TransformerConfig, vp_stage: int | None) -> Any:
    """The layers of a chunk with this attention kernel, as GPTModel expects them."""
    spec = _layer_spec(kernel, config)
    if kernel == "te":
        return spec
    layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=packed_norm(config))


def mtp_spec(kernel: Kernel, config: TransformerConfig, vp_stage: int | None) -> Any:
    """The layers of multi-token prediction; None if the model or the chunk has none."""
    if not config.mtp_num_layers:
        return None
    uses_te = kernel == "te"
    # The spec of a layer, not of the block: the last chunk may have no transformer layers.
    block = get_gpt_mtp_block_spec(
        config, _layer_spec(kernel, config), use_transformer_engine=uses_te, vp_stage=vp_stage
    )
    if block is None or uses_te:
        return block
    norm = packed_norm(config)
    for layer in block.layer_specs:
        layer.submodules.enorm = norm
        layer.submodules.hnorm = norm
        layer.submodules.layer_norm = norm
    return block
