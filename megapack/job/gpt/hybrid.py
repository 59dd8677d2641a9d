"""Megatron-Core's HybridModel for packed rows: its layer specs and its chunks.

Each letter of a model's pattern is a layer that is attention, a recurrent layer or an MLP alone. A
model without one has whole blocks, each in the place of a letter: numbers, names and layouts of
layers are those of a GPTModel, and so are checkpoints. HybridModel is in Megatron-Core since 0.18.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.hybrid import hybrid_block, hybrid_model
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
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

from megapack.base.choices import Kernel
from megapack.cost.options import ModelOptions
from megapack.cost.stages import StageLayers
from megapack.job.gpt.specs import final_norm, layer_spec, layer_specs, mtp_spec, packed_norm
from megapack.model.recurrent.gated_delta import PackedGatedDeltaNet
from megapack.model.recurrent.mamba import PackedMambaMixer
from megapack.model.replaced import replaced


class _Stack(HybridStack):  # type: ignore[misc]
    """The layers, whose last norm has the name of a GPTModel's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if "final_norm" in self._modules:
            self.final_layernorm = self._modules.pop("final_norm")

    @property
    def final_norm(self) -> Any:
        """As HybridStack reads it."""
        return self.final_layernorm


class _Block:
    """Makes the block of a number, for a letter's place in a stack."""

    def __new__(cls, specs: Sequence[ModuleSpec], layer_number: int, **kwargs: Any) -> Any:
        return build_module(specs[layer_number - 1], layer_number=layer_number, **kwargs)


def hybrid_chunk(
    kernel: Kernel, model: ModelOptions, split: StageLayers, arguments: Mapping[str, Any]
) -> HybridModel:
    """A chunk of a model as a HybridModel.

    Args:
        split: how many layers each chunk has.
        arguments: others of HybridModel.
    """
    config, letters = arguments["config"], model.layer_pattern
    pattern = letters or "*" * model.num_layers
    segments = (
        pattern[first : first + count]
        for first, count in zip(split.offsets, split.num_layers, strict=True)
    )
    depths = [model.mtp_pattern or "*"] * model.mtp_num_layers
    if letters is None:
        blocks = ModuleSpec(_Block, params={"specs": layer_specs(kernel, config, model)})
        submodules = HybridStackSubmodules(attention_layer=blocks)
    else:
        submodules = _letters(kernel, config, model)
    submodules.mtp_block_spec = mtp_spec(kernel, config, arguments["vp_stage"], model)
    ahead = _depths_of_blocks if letters is None else MultiTokenPredictionBlock
    # No spec has the class of a stack's last norm.
    with (
        replaced(hybrid_block, TENorm=final_norm(kernel, config)),
        replaced(hybrid_model, MultiTokenPredictionBlock=ahead),
    ):
        chunk = HybridModel(
            hybrid_stack_spec=ModuleSpec(_Stack, submodules=submodules),
            hybrid_layer_pattern="/".join(["|".join(segments), *depths]),
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
            **arguments,
        )
    if letters is None:
        # Its letters would say that blocks are attention alone (see `head.layer_letters`).
        chunk.hybrid_layer_pattern = chunk.mtp_pattern = None
    if hasattr(chunk, "rotary_pos_emb"):
        # HybridModel does not tell it, and layers turn pairs by the config.
        chunk.rotary_pos_emb.rotary_interleaved = config.rotary_interleaved
    return chunk


def _depths_of_blocks(**given: Any) -> MultiTokenPredictionBlock:
    """Multi-token prediction by its spec and not by letters: each depth is a block."""
    by_letters = ("mtp_layer_pattern", "mtp_num_depths", "hybrid_submodules", "mamba_submodules")
    return MultiTokenPredictionBlock(
        **{name: value for name, value in given.items() if name not in by_letters}
    )


def _letters(
    kernel: Kernel, config: TransformerConfig, model: ModelOptions
) -> HybridStackSubmodules:
    """The layers of a pattern's letters with this attention kernel."""
    dense = layer_spec(kernel, config, False, model).submodules
    experts = layer_spec(kernel, config, bool(config.num_moe_experts), model).submodules
    # Transformer Engine's projections begin with the norm.
    norm = IdentityOp if kernel == "te" else packed_norm(config)
    into, out_of = _linears(kernel)
    plain = _plain(final_norm(kernel, config))
    attention = TransformerLayerSubmodules(
        input_layernorm=dense.input_layernorm,
        self_attention=dense.self_attention,
        self_attn_bda=get_bias_dropout_add,
    )
    gated_delta = TransformerLayerSubmodules(
        input_layernorm=norm,
        self_attention=ModuleSpec(
            PackedGatedDeltaNet,
            submodules=GatedDeltaNetSubmodules(in_proj=into, out_norm=plain, out_proj=out_of),
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
    return HybridStackSubmodules(
        mamba_layer=ModuleSpec(MambaLayer, submodules=mamba),
        gdn_layer=ModuleSpec(TransformerLayer, submodules=gated_delta),
        attention_layer=ModuleSpec(TransformerLayer, submodules=attention),
        mlp_layer=ModuleSpec(MLPLayer, submodules=_mlp(dense)),
        moe_layer=ModuleSpec(MoETransformerLayer, submodules=_mlp(experts)),
    )


def _mlp(layer: TransformerLayerSubmodules) -> TransformerLayerSubmodules:
    return TransformerLayerSubmodules(
        pre_mlp_layernorm=layer.pre_mlp_layernorm, mlp=layer.mlp, mlp_bda=get_bias_dropout_add
    )


def _linears(kernel: Kernel) -> tuple[Any, Any]:
    """The classes of a recurrent layer's projections."""
    if kernel != "te":
        return ColumnParallelLinear, RowParallelLinear
    from megatron.core.extensions import transformer_engine as te

    return te.TELayerNormColumnParallelLinear, te.TERowParallelLinear


def _plain(norm: Any) -> type:
    """The norm with weights around 1, as transformers has it inside of a gated delta net."""

    class PlainNorm:
        def __new__(cls, config: TransformerConfig, *args: Any, **kwargs: Any) -> Any:
            own = copy.copy(config)
            own.layernorm_zero_centered_gamma = False
            return norm(own, *args, **kwargs)

    return PlainNorm
