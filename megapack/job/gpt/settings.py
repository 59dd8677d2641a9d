"""Megatron's settings for speed: which are on for a model on this machine.

The values are those of Megatron-Bridge's recipes where packed rows allow them;
docs/maintainers/gpu_checks.md has the table. A config key set to true or false overrides the
choice; true where it cannot run is an error that says why. The model is built with these settings,
and the first lines of a run print them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from megapack import cpu
from megapack.base.choices import Kernel
from megapack.errors import ConfigError
from megapack.job.config.sections import ModelConfig, OptimConfig
from megapack.layout import Layout

_NOT_CUDA = "the device is not CUDA"

Settings = Mapping[str, Any]
"""Megatron's name of a setting -> its value."""


def layer_settings(model: ModelConfig, kernel: Kernel) -> Settings:
    """Fields of TransformerConfig that choose faster kernels for this model's layers.

    Args:
        kernel: the attention kernel, see `attention.choice.choose_attention`.

    Raises:
        ConfigError: the config asks for a setting that cannot run here.
    """
    te = None if kernel == "te" else f"needs Transformer Engine's layers, attention is {kernel}"
    # In FP8 Transformer Engine's layers overwrite the gradients of an earlier step.
    accumulates = model.fp8 is None
    settings = {
        "bias_activation_fusion": _choose(
            "model.bias_activation_fusion",
            model.bias_activation_fusion,
            impossible=_activation_obstacle(model),
            by_default=cpu.uses_cuda(),
        ),
        "gradient_accumulation_fusion": _choose(
            "model.gradient_accumulation_fusion",
            model.gradient_accumulation_fusion,
            impossible=_fusion_obstacle(kernel),
            by_default=accumulates,
        ),
    }
    if model.num_experts is not None:
        for name in ("moe_grouped_gemm", "moe_permute_fusion"):
            settings[name] = _choose(f"model.{name}", getattr(model, name), impossible=te)
    return settings


def reduction_settings(optim: OptimConfig, layout: Layout) -> Settings:
    """Fields of DistributedDataParallelConfig that overlap communication with computation.

    Raises:
        ConfigError: the config asks for a setting that this layout or optimizer does not have.
    """
    reduces = _choose(
        "optim.overlap_grad_reduce",
        optim.overlap_grad_reduce,
        impossible=None,
        by_default=cpu.uses_cuda() and layout.dp * layout.cp > 1,
    )
    obstacle = None if reduces else "needs overlap_grad_reduce, which is off"
    if not optim.distributed_optimizer:
        obstacle = "needs optim.distributed_optimizer=true"
    gathers = _choose("optim.overlap_param_gather", optim.overlap_param_gather, impossible=obstacle)
    return {
        "overlap_grad_reduce": reduces,
        "overlap_param_gather": gathers,
        # With VPP a stage's chunks gather at the same moments on all stages. A stage that gathered
        # on its own would delay the stages that wait for its output.
        "align_param_gather": gathers and layout.vpp > 1,
        "bucket_size": optim.bucket_size,
    }


def describe(*groups: Settings) -> str:
    """One line for the start of a run: the settings that are on, and those that are off."""
    names: dict[bool, list[str]] = {True: [], False: []}
    for name, value in (item for settings in groups for item in settings.items()):
        if isinstance(value, bool) and name != "align_param_gather":
            names[value].append(name)
    on, off = (", ".join(names[value]) or "none" for value in (True, False))
    return f"settings on: {on}; off: {off}"


def _choose(
    key: str, asked: bool | None, *, impossible: str | None, by_default: bool = True
) -> bool:
    """What is asked for, else the default where nothing speaks against it."""
    if asked and impossible is not None:
        raise ConfigError(f"{key}=true cannot run here: {impossible}; set null or false")
    return impossible is None and (by_default if asked is None else asked)


def _activation_obstacle(model: ModelConfig) -> str | None:
    if not model.gated_linear_unit:
        return "Megatron fuses an MLP without a gate only with biases"
    if model.activation not in (None, "silu"):
        return f"Megatron fuses SwiGLU, the activation is {model.activation}"
    return None


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
