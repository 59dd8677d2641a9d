"""Megatron-Core's HybridModel for packed rows: its layer specs and its chunks.

Each letter of its pattern is a layer that is attention, a recurrent layer or an MLP alone.
HybridModel is in Megatron-Core since 0.18.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

from megapack.base.choices import Kernel
from megapack.cost.stages import StageLayers
from megapack.job.gpt.specs import final_norm, layer_spec, packed_norm
from megapack.model.recurrent.gated_delta import PackedGatedDeltaNet
from megapack.model.recurrent.mamba import PackedMambaMixer
from megapack.model.replaced import replaced


def hybrid_chunk(
    kernel: Kernel,
    pattern: str,
    split: StageLayers,
    arguments: Mapping[str, Any],
    *,
    mtp_pattern: str = "",
) -> HybridModel:
    """A chunk of a hybrid model.

    Args:
        pattern: the letters of the whole model's layers.
        split: how many of them each chunk has.
        arguments: others of HybridModel.
        mtp_pattern: the letters of a depth of multi-token prediction.
    """
    config = arguments["config"]
    segments = (
        pattern[first : first + count]
        for first, count in zip(split.offsets, split.num_layers, strict=True)
    )
    depths = [mtp_pattern] * (config.mtp_num_layers or 0)
    # No spec has the class of a stack's last norm.
    with replaced(hybrid_block, TENorm=final_norm(kernel, config)):
        return HybridModel(
            hybrid_stack_spec=_stack_spec(kernel, config),
            hybrid_layer_pattern="/".join(["|".join(segments), *depths]),
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
            **arguments,
        )


def _stack_spec(kernel: Kernel, config: TransformerConfig) -> ModuleSpec:
    """The layers of a hybrid model, by letters, with this attention kernel."""
    dense = layer_spec(kernel, config, experts=False).submodules
    # Transformer Engine's projections begin with the norm.
    norm = IdentityOp if kernel == "te" else packed_norm(config)
    into, out_of, column = _linears(kernel)
    last_norm = final_norm(kernel, config)
    attention = TransformerLayerSubmodules(
        input_layernorm=dense.input_layernorm,
        self_attention=dense.self_attention,
        self_attn_bda=get_bias_dropout_add,
    )
    gated_delta = TransformerLayerSubmodules(
        input_layernorm=norm,
        self_attention=ModuleSpec(
            PackedGatedDeltaNet,
            submodules=GatedDeltaNetSubmodules(
                in_proj=into, out_norm=_plain(last_norm), out_proj=out_of
            ),
        ),
        self_attn_bda=get_bias_dropout_add,
    )
    mamba = MambaLayerSubmodules(
        norm=norm,
        mixer=ModuleSpec(
            PackedMambaMixer, submodules=MambaMixerSubmodules(in_proj=into, out_proj=out_of)
        ),
        mamba_bda=get_bias_dropout_add,
    )
    return ModuleSpec(
        HybridStack,
        submodules=HybridStackSubmodules(
            mamba_layer=ModuleSpec(MambaLayer, submodules=mamba),
            gdn_layer=ModuleSpec(TransformerLayer, submodules=gated_delta),
            attention_layer=ModuleSpec(TransformerLayer, submodules=attention),
            mlp_layer=ModuleSpec(MLPLayer, submodules=_mlp(dense)),
            moe_layer=_experts(kernel, config),
            mtp_block_spec=_mtp(last_norm, column),
        ),
    )


def _mlp(layer: TransformerLayerSubmodules) -> TransformerLayerSubmodules:
    return TransformerLayerSubmodules(
        pre_mlp_layernorm=layer.pre_mlp_layernorm, mlp=layer.mlp, mlp_bda=get_bias_dropout_add
    )


def _experts(kernel: Kernel, config: TransformerConfig) -> Any:
    if not config.num_moe_experts:
        return IdentityOp
    layer = layer_spec(kernel, config, experts=True).submodules
    return ModuleSpec(MoETransformerLayer, submodules=_mlp(layer))


def _mtp(norm: Any, projection: Any) -> ModuleSpec:
    """What multi-token prediction has besides layers of the stack's kinds."""
    layer = MultiTokenPredictionLayerSubmodules(
        enorm=norm, hnorm=norm, eh_proj=projection, mtp_model_layer=None, layer_norm=norm
    )
    return ModuleSpec(
        MultiTokenPredictionBlock,
        submodules=MultiTokenPredictionBlockSubmodules(
            layer_specs=[ModuleSpec(MultiTokenPredictionLayer, submodules=layer)]
        ),
    )


def _linears(kernel: Kernel) -> tuple[Any, Any, Any]:
    """The classes of a recurrent layer's projections, and of one without a norm before it."""
    if kernel != "te":
        return ColumnParallelLinear, RowParallelLinear, ColumnParallelLinear
    from megatron.core.extensions import transformer_engine as te

    return te.TELayerNormColumnParallelLinear, te.TERowParallelLinear, te.TEColumnParallelLinear


def _plain(norm: Any) -> type:
    """The norm with weights around 1, as transformers has it inside of a gated delta net."""

    class PlainNorm:
        def __new__(cls, config: TransformerConfig, *args: Any, **kwargs: Any) -> Any:
            own = copy.copy(config)
            own.layernorm_zero_centered_gamma = False
            return norm(own, *args, **kwargs)

    return PlainNorm
