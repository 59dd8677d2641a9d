"""Megatron-Core's layer specs, with attention that keeps packed samples apart."""

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


class PackedNorm(torch.nn.Module):
    """LayerNorm or RMSNorm for the local spec, marked for sequence parallelism.

    Megatron's own fallback norm refuses sequence parallelism; marking the parameters makes it sum
    their gradients over the tensor-parallel ranks that see different tokens.
    """

    def __new__(
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> Any:
        """A torch norm of `hidden_size`."""
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = kind(hidden_size, eps=eps, dtype=config.params_dtype)
        for param in norm.parameters():
            param.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


def local_layer_spec(
    config: TransformerConfig, attention: Literal["varlen", "sdpa"] = "sdpa"
) -> ModuleSpec:
    """Megatron's local layer spec with attention that keeps packed samples apart."""
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
    spec.submodules.input_layernorm = PackedNorm
    spec.submodules.pre_mlp_layernorm = PackedNorm
    if config.qk_layernorm:
        parts.q_layernorm = parts.k_layernorm = PackedNorm
    return spec


def block_spec(kernel: Kernel, config: TransformerConfig, vp_stage: int | None) -> Any:
    """The layers of a chunk, with attention by `kernel`, in the form that GPTModel takes."""
    if kernel == "te":
        from megatron.core.models.gpt.gpt_layer_specs import (
            get_gpt_layer_with_transformer_engine_spec,
        )

        spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
        )
        if config.num_moe_experts:
            use_packed_router(spec.submodules.mlp)
        return spec
    layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(
        layer_specs=[local_layer_spec(config, kernel)] * layers, layer_norm=PackedNorm
    )


def mtp_spec(kernel: Kernel, config: TransformerConfig, spec: Any, vp_stage: Any) -> Any:
    """The layers of multi-token prediction; None where the model or the chunk has none."""
    if not config.mtp_num_layers:
        return None
    te = kernel == "te"
    block = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=te, vp_stage=vp_stage)
    for layer in block.layer_specs if block is not None and not te else ():
        layer.submodules.enorm = layer.submodules.hnorm = PackedNorm
        layer.submodules.layer_norm = PackedNorm
    return block
