"""Hybrid models of the reference: recurrent layers run one unpadded sample token by token.

Parameters are those of Megatron's layers; between their projections is the recurrence as the papers
have it, without chunks, segments or kernels. Attention, MLPs and experts are Megatron's own.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.ssm import gated_delta_net, mamba_context_parallel, mamba_mixer
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
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
from torch import Tensor

from megapack.job.config.sections import ModelConfig


class StepwiseGatedDeltaNet(GatedDeltaNet):
    """A gated delta net (arXiv 2412.06464, equation 10)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        module = getattr(gated_delta_net, "common", gated_delta_net)
        with mock.patch.object(module, "HAVE_FLA", True):
            super().__init__(*args, **kwargs)

    def _setup_variant_attrs(self) -> None:
        super()._setup_variant_attrs()
        self.gated_delta_rule = "not used"

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor | None]:
        """[tokens, 1, hidden] -> the same, and no bias."""
        qk, v, heads = self.qk_dim, self.v_dim, self.num_value_heads
        projected = self.in_proj(hidden_states)[0][:, 0]
        mixed, gate, beta, alpha = projected.split([2 * qk + v, v, heads, heads], dim=-1)
        mixed = causal(mixed, self.conv1d.weight, None)
        q, k, v_ = mixed.split([qk, qk, v], dim=-1)
        repeats = heads // self.num_key_heads
        q, k = (
            F.normalize(x.unflatten(-1, (-1, self.key_head_dim)), dim=-1).repeat_interleave(
                repeats, dim=1
            )
            for x in (q, k)
        )
        v_ = v_.unflatten(-1, (heads, -1))
        keep = (-self.A_log.exp() * F.softplus(alpha + self.dt_bias)).exp()
        beta = beta.sigmoid()
        state = q.new_zeros(heads, self.key_head_dim, self.value_head_dim)
        outs = []
        for t in range(len(q)):
            state = state * keep[t, :, None, None]
            error = v_[t] - (state * k[t, :, :, None]).sum(1)
            state = state + beta[t, :, None, None] * k[t, :, :, None] * error[:, None]
            outs.append((state * q[t, :, :, None]).sum(1) / self.key_head_dim**0.5)
        out = self.out_norm(torch.stack(outs)) * F.silu(gate.unflatten(-1, (heads, -1)))
        return self.out_proj(out.flatten(1)[:, None])  # type: ignore[no-any-return]


class StepwiseMamba(MambaMixer):
    """A Mamba-2 mixer (arXiv 2405.21060, equation 2)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        installed = {"HAVE_MAMBA_SSM": True, "HAVE_EINOPS": True}
        with (
            mock.patch.multiple(mamba_mixer, ExtendedRMSNorm=GroupNorm, **installed),
            mock.patch.object(mamba_context_parallel, "HAVE_EINOPS", True),
        ):
            super().__init__(*args, **kwargs)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor | None]:
        """[tokens, 1, hidden] -> the same, and no bias."""
        inner, heads, groups, size = self.d_inner, self.nheads, self.ngroups, self.d_state
        projected = self.in_proj(hidden_states)[0][:, 0]
        gate, mixed, dt = projected.split([inner, inner + 2 * groups * size, heads], dim=-1)
        conv = getattr(self, "conv1d", None)
        weight = self.conv1d_weight if conv is None else conv.weight
        bias = self.conv1d_bias if conv is None else conv.bias
        x, B, C = causal(mixed, weight, bias).split([inner, groups * size, groups * size], dim=-1)
        x = x.unflatten(-1, (heads, -1))
        B, C = (
            y.unflatten(-1, (groups, size)).repeat_interleave(heads // groups, dim=1)
            for y in (B, C)
        )
        dt = F.softplus(dt + self.dt_bias)
        keep = (-self.A_log.exp() * dt).exp()
        state = x.new_zeros(heads, self.headdim, size)
        outs = []
        for t in range(len(x)):
            new = dt[t, :, None, None] * x[t, :, :, None] * B[t, :, None]
            state = state * keep[t, :, None, None] + new
            outs.append((state * C[t, :, None]).sum(-1) + self.D[:, None] * x[t])
        out = torch.stack(outs).flatten(1) * F.silu(gate)
        return self.out_proj(self.norm(out)[:, None])  # type: ignore[no-any-return]


class GroupNorm(torch.nn.Module):
    """RMS norm of groups of channels."""

    def __init__(self, width: int, eps: float, group_size: int, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))
        self._eps = eps
        self._size = group_size

    def forward(self, x: Tensor) -> Tensor:
        """[T, D] -> [T, D]."""
        groups = x.unflatten(-1, (-1, self._size))
        mean = groups.square().mean(-1, keepdim=True)
        return (groups / (mean + self._eps).sqrt()).flatten(-2) * self.weight


def causal(x_TD: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The short convolution, by shifted copies, and SiLU."""
    width = weight.shape[-1]
    padded = torch.cat([x_TD.new_zeros(width - 1, x_TD.shape[1]), x_TD])
    out = sum(padded[k : k + len(x_TD)] * weight[:, 0, k] for k in range(width))
    return F.silu(out if bias is None else out + bias)


class Norm(torch.nn.Module):
    """RMS norm that multiplies by the weight, or by 1 + weight."""

    def __init__(self, config: Any, hidden_size: int, *_: Any, **__: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))
        self._eps = config.layernorm_epsilon
        self._one = float(config.layernorm_zero_centered_gamma)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return (
            x / (x.square().mean(-1, keepdim=True) + self._eps).sqrt() * (self._one + self.weight)
        )


class InnerNorm(Norm):
    """The norm of a gated delta net, whose weight is around 1."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._one = 0.0


def build_hybrid(settings: ModelConfig, config: Any, attention: Any) -> HybridModel:
    """The model, with Megatron's own attention and without packed rows.

    Args:
        attention: Megatron's core attention where it is multi-latent.
    """
    kinds = {
        has_experts: get_gpt_layer_local_spec(
            num_experts=settings.num_experts if has_experts else None,
            qk_layernorm=settings.qk_layernorm,
            multi_latent_attention=config.multi_latent_attention,
            normalization="RMSNorm",
        ).submodules
        for has_experts in {False, settings.num_experts is not None}
    }
    dense = kinds[False]
    if config.multi_latent_attention:
        dense.self_attention.submodules.core_attention = attention
    elif settings.qk_layernorm:
        dense.self_attention.submodules.q_layernorm = Norm
        dense.self_attention.submodules.k_layernorm = Norm

    def block(norm: str, part: str, spec: Any) -> TransformerLayerSubmodules:
        parts = {norm: Norm, part: spec, f"{part.replace('attention', 'attn')}_bda": bias_dropout}
        return TransformerLayerSubmodules(**parts)

    bias_dropout = get_bias_dropout_add
    projections = {"in_proj": ColumnParallelLinear, "out_proj": RowParallelLinear}
    gated_delta = ModuleSpec(
        StepwiseGatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(out_norm=InnerNorm, **projections),
    )
    mamba = ModuleSpec(StepwiseMamba, submodules=MambaMixerSubmodules(**projections))
    layers = {
        "gdn_layer": (TransformerLayer, block("input_layernorm", "self_attention", gated_delta)),
        "attention_layer": (
            TransformerLayer,
            block("input_layernorm", "self_attention", dense.self_attention),
        ),
        "mlp_layer": (MLPLayer, block("pre_mlp_layernorm", "mlp", dense.mlp)),
        "mamba_layer": (
            MambaLayer,
            MambaLayerSubmodules(norm=Norm, mixer=mamba, mamba_bda=bias_dropout),
        ),
    }
    if settings.num_experts is not None:
        experts = block("pre_mlp_layernorm", "mlp", kinds[True].mlp)
        layers["moe_layer"] = (MoETransformerLayer, experts)
    depths = [settings.mtp_pattern] * settings.mtp_num_layers
    ahead = MultiTokenPredictionLayerSubmodules(
        enorm=Norm, hnorm=Norm, eh_proj=ColumnParallelLinear, mtp_model_layer=None, layer_norm=Norm
    )
    mtp = MultiTokenPredictionBlockSubmodules(
        [ModuleSpec(MultiTokenPredictionLayer, submodules=ahead)]
    )
    specs = {name: ModuleSpec(module, submodules=own) for name, (module, own) in layers.items()}
    specs["mtp_block_spec"] = ModuleSpec(MultiTokenPredictionBlock, submodules=mtp)
    with mock.patch.object(hybrid_block, "TENorm", Norm):
        return HybridModel(
            config=config,
            hybrid_stack_spec=ModuleSpec(HybridStack, submodules=HybridStackSubmodules(**specs)),
            vocab_size=128,
            max_sequence_length=settings.max_position_embeddings,
            hybrid_layer_pattern="/".join([settings.layer_pattern, *depths]),
            share_embeddings_and_output_weights=not settings.untie_embeddings,
            position_embedding_type=settings.position_embedding_type,
            rotary_base=settings.rotary_base,
            rotary_percent=settings.rotary_percent,
        )
