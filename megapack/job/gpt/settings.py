"""Megatron's settings for speed: which are on for a model on this machine, and why others are off.

The values are those of Megatron-Bridge's recipes where packed rows allow them; docs/gpu.md has the
table. A config key set to true or false overrides the choice. The model is built with these
settings, and the first lines of a run print them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megapack import cpu
from megapack.base.choices import Kernel
from megapack.errors import ConfigError
from megapack.job.config.sections import ModelConfig, OptimConfig
from megapack.layout import Layout

_NOT_CUDA = "the device is not CUDA"


@dataclass(frozen=True)
class Setting:
    """A setting's value, and the reason if it is off."""

    value: Any
    why_off: str | None = None


Settings = Mapping[str, Setting]
"""Megatron's name of a setting -> its value."""

FIXED: Settings = {
    "bias_dropout_fusion": Setting(False, "the layers have no dropout"),
    "masked_softmax_fusion": Setting(False, "attention over packed rows has no mask"),
    "persist_layer_norm": Setting(False, "norms are Transformer Engine's or torch's, not apex's"),
}
"""Fields of TransformerConfig that recipes turn on and that have no effect on packed rows."""


def layer_settings(model: ModelConfig, kernel: Kernel) -> Settings:
    """Fields of TransformerConfig that choose faster kernels for this model's layers.

    Args:
        kernel: the attention kernel, see `attention.choice.choose_attention`.

    Raises:
        ConfigError: the config asks for a setting that cannot run here.
    """
    te = None if kernel == "te" else f"needs Transformer Engine's layers, attention is {kernel}"
    settings = {
        "bias_activation_fusion": _choose(
            "model.bias_activation_fusion",
            model.bias_activation_fusion,
            impossible=_activation_obstacle(model),
            unwanted=_without_cuda(),
        ),
        "gradient_accumulation_fusion": _choose(
            "model.gradient_accumulation_fusion",
            model.gradient_accumulation_fusion,
            impossible=_fusion_obstacle(kernel),
            # In FP8 Transformer Engine's layers overwrite the gradients of an earlier step.
            unwanted="with FP8 it replaces gradients instead of adding to them"
            if model.fp8
            else None,
        ),
    }
    if model.num_experts is not None:
        settings["moe_grouped_gemm"] = _choose(
            "model.moe_grouped_gemm", model.moe_grouped_gemm, impossible=te
        )
        settings["moe_permute_fusion"] = _choose(
            "model.moe_permute_fusion", model.moe_permute_fusion, impossible=te
        )
    return settings


def reduction_settings(optim: OptimConfig, layout: Layout) -> Settings:
    """Fields of DistributedDataParallelConfig that overlap communication with computation.

    Raises:
        ConfigError: the config asks for a setting that this layout or optimizer does not have.
    """
    alone = "there is one data-parallel rank" if layout.dp * layout.cp == 1 else None
    reduce = _choose(
        "optim.overlap_grad_reduce",
        optim.overlap_grad_reduce,
        impossible=None,
        unwanted=_without_cuda() or alone,
    )
    gather = _choose(
        "optim.overlap_param_gather",
        optim.overlap_param_gather,
        impossible=_gather_obstacle(optim, reduce),
    )
    # With VPP a stage's chunks gather at the same moments on all stages. A stage that gathered on
    # its own would delay the stages that wait for its output.
    aligned = bool(gather.value) and layout.vpp > 1
    return {
        "overlap_grad_reduce": reduce,
        "overlap_param_gather": gather,
        "align_param_gather": Setting(aligned, None if aligned else "there is no gather to align"),
        "bucket_size": Setting(optim.bucket_size),
    }


def values(settings: Settings) -> dict[str, Any]:
    """The settings as keyword arguments."""
    return {name: setting.value for name, setting in settings.items()}


def describe(*groups: Settings) -> str:
    """One line for the start of a run: the settings that are on, and the others by reason."""
    switches = {
        name: setting
        for settings in groups
        for name, setting in settings.items()
        if isinstance(setting.value, bool) and name != "align_param_gather"
    }
    on = [name for name, setting in switches.items() if setting.value]
    off: dict[str, list[str]] = {}
    for name, setting in switches.items():
        if not setting.value:
            off.setdefault(str(setting.why_off), []).append(name)
    reasons = [f"not {', '.join(names)}: {why}" for why, names in off.items()]
    return "; ".join([f"settings on: {', '.join(on) or 'none'}", *reasons])


def _choose(
    key: str, asked: bool | None, *, impossible: str | None, unwanted: str | None = None
) -> Setting:
    """On, unless a reason speaks against it; `unwanted` only speaks against the default."""
    if asked is False:
        return Setting(False, f"{key}=false")
    if asked and impossible is not None:
        raise ConfigError(f"{key}=true cannot run here: {impossible}; set null or false")
    why_off = impossible or (None if asked else unwanted)
    return Setting(why_off is None, why_off)


def _activation_obstacle(model: ModelConfig) -> str | None:
    if not model.gated_linear_unit:
        return "Megatron fuses an MLP without a gate only with biases"
    if model.activation not in (None, "silu"):
        return f"Megatron fuses SwiGLU, the activation is {model.activation}"
    return None


def _without_cuda() -> str | None:
    return None if cpu.uses_cuda() else _NOT_CUDA


def _fusion_obstacle(kernel: Kernel) -> str | None:
    """Why no linear layer of this model can add its weight gradients to the main ones itself.

    Transformer Engine's layers can; Megatron's own need an extension of apex.
    """
    if kernel == "te":
        return None
    if not cpu.uses_cuda():
        return _NOT_CUDA
    if importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None:
        return None
    return "needs Transformer Engine's layers or apex's fused_weight_gradient_mlp_cuda"


def _gather_obstacle(optim: OptimConfig, reduce: Setting) -> str | None:
    if not optim.distributed_optimizer:
        return "needs optim.distributed_optimizer=true"
    return None if reduce.value else f"needs overlap_grad_reduce, which is off: {reduce.why_off}"
