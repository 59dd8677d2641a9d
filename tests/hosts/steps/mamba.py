"""A toy of Megatron's HybridModel with recurrent layers, in place of the toy GPT of a host's step.

The layers are Megatron's own, with torch in place of their kernels. So a host's step shows what its
description of a row tells them. Needs Megatron-Core 0.18, and Triton, which Megatron imports.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from megapack import Layout

PATTERN = "M-*-M-"
"""Mamba-2, an MLP, attention, and so on."""
HYBRID = "G-*-M-"
"""A gated delta net, too."""
needs_mamba = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("triton", "megatron.core.models.hybrid"))),
    reason="needs Megatron-Core 0.18, and Triton",
)
"""For tests that run it."""


def pattern_of(case: str) -> str:
    """The layers of a case with `hybrid` or `mamba` in it; "" = it has the toy GPT.

    >>> pattern_of("mamba_whole"), pattern_of("prompts")
    ('M-*-M-', '')
    """
    return HYBRID if "hybrid" in case else PATTERN if "mamba" in case else ""


def mamba_chunks(settings: dict[str, Any], pattern: str = PATTERN, **ddp: Any) -> list[Any]:
    """The model on one stage, in Megatron's DDP with these settings."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    model = mamba_model(settings, pattern)
    model.config.finalize_model_grads_func = finalize_model_grads
    reduction = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **ddp)
    return [DistributedDataParallel(model.config, reduction, model)]


def mamba_model(settings: dict[str, Any], pattern: str = PATTERN) -> Any:
    """The model on one stage; the host has made Megatron's groups.

    Args:
        settings: of the config, as in `chunks.host_chunks`.
        pattern: its layers.
    """
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    from megapack.job.gpt import build
    from megapack.job.gpt.specs import local_layer_spec, packed_norm
    from tests import stock_mixers
    from tests.dist import problem

    stock_mixers.install()
    config = build.transformer_config(problem.MODEL, Layout())
    sizes = {"mamba_state_dim": 8, "mamba_head_dim": 8, "mamba_num_groups": 2}
    delta = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
    delta |= {"linear_value_head_dim": 8, "linear_conv_kernel_dim": 4}
    layers = {"num_layers": len(pattern), "is_hybrid_model": True}
    for name, value in {**settings, **sizes, **delta, **layers}.items():
        assert hasattr(config, name)
        setattr(config, name, value)
    norm = packed_norm(config)
    # The final norm is not part of the spec.
    hybrid_block.TENorm = norm
    parts = local_layer_spec(config).submodules
    mixer = ModuleSpec(
        MambaMixer,
        submodules=MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear),
    )
    stack = hybrid_block.HybridStackSubmodules(
        mamba_layer=ModuleSpec(
            MambaLayer,
            submodules=MambaLayerSubmodules(norm=norm, mixer=mixer, mamba_bda=get_bias_dropout_add),
        ),
        attention_layer=ModuleSpec(
            TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=norm,
                self_attention=parts.self_attention,
                self_attn_bda=get_bias_dropout_add,
            ),
        ),
        gdn_layer=ModuleSpec(
            TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=norm,
                self_attention=ModuleSpec(
                    GatedDeltaNet,
                    submodules=GatedDeltaNetSubmodules(
                        in_proj=ColumnParallelLinear, out_norm=norm, out_proj=RowParallelLinear
                    ),
                ),
                self_attn_bda=get_bias_dropout_add,
            ),
        ),
        mlp_layer=ModuleSpec(
            MLPLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=norm, mlp=parts.mlp, mlp_bda=get_bias_dropout_add
            ),
        ),
    )
    model = HybridModel(
        config=config,
        hybrid_stack_spec=ModuleSpec(hybrid_block.HybridStack, submodules=stack),
        vocab_size=128,
        max_sequence_length=512,
        hybrid_layer_pattern=pattern,
        share_embeddings_and_output_weights=True,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    draw_weights(model)
    return model


def draw_weights(model: torch.nn.Module) -> None:
    """Weights that are the same in every job, and a state that fades slowly."""
    generator = torch.Generator().manual_seed(11)
    for name, weight in model.named_parameters():
        drawn = torch.randn(weight.shape, generator=generator) * 0.2
        is_norm = weight.dim() == 1 and "norm" in name
        with torch.no_grad():
            weight.copy_(1 + drawn if is_norm else drawn - 2 if "A_log" in name else drawn)


def packed_seq_params(total_tokens: int | None = None, **fields: Any) -> Any:
    """Megatron's class, which has `total_tokens` since 0.17; its Mamba layers need it."""
    from megatron.core.packed_seq_params import PackedSeqParams

    has_it = hasattr(PackedSeqParams, "total_tokens")
    return PackedSeqParams(**fields, **{"total_tokens": total_tokens} if has_it else {})


class Told:
    """Notes of each row of a model whether its description tells a Mamba layer the samples."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.rows: list[tuple[bool, bool]] = []
        """Whether it did when the model was called, and whether it does after the call."""
        self._before = False
        model.register_forward_pre_hook(self._enter, with_kwargs=True)
        model.register_forward_hook(self._leave, with_kwargs=True)

    def _enter(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self._before = _is_told(kwargs["packed_seq_params"])

    def _leave(self, model: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        self.rows.append((self._before, _is_told(kwargs["packed_seq_params"])))


def _is_told(params: Any) -> bool:
    return getattr(params, "seq_idx", None) is not None
