"""Which optional kernels Megatron-Core takes on this machine: Transformer Engine, apex or torch."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal

from megapack.apex import Apex, find_apex
from megapack.choices import Attention, Dtype, Kernel

Library = Literal["te", "apex", "torch"]


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """What a model of a given attention and dtype runs with."""

    attention: Kernel
    passed_over: dict[str, str]
    """Kernels that come before it, and what keeps each from running."""
    norm: Library
    """The layers' norms."""
    optimizer: Library
    """Adam."""
    grad_norm: Library
    """Gradient norms and their clipping."""
    rope_fusion: bool
    """Rotary embeddings in one kernel."""
    gradient_accumulation_fusion: bool
    """Weight gradients are added to the main gradients inside the matrix product."""
    apex: Apex
    """Whether NVIDIA's apex is installed, or a package that only has its name."""

    def __str__(self) -> str:
        """One line, for the start of a run."""
        fused = [name for name in ("rope", "gradient_accumulation") if self._fused(name)]
        reasons = "".join(f"; not {name}: {why}" for name, why in self.passed_over.items())
        return (
            f"attention {self.attention}, norms {self.norm}, Adam {self.optimizer}, gradient norm "
            f"{self.grad_norm}, fused: {', '.join(fused) or 'nothing'}{reasons}"
        )

    def _fused(self, name: str) -> bool:
        return bool(getattr(self, f"{name}_fusion"))


def find_kernels(
    attention: Attention = "auto",
    dtype: Dtype = "bf16",
) -> Kernels:
    """What Megatron-Core takes for a model of this `ModelConfig.attention` and `dtype`.

    Raises:
        ConfigError: an attention is asked for that cannot run here.
    """
    from megatron.core.optimizer import Adam, clip_grads

    from megapack.attention_choice import choose_attention, passed_over

    kernel = choose_attention(attention, dtype)
    return Kernels(
        attention=kernel,
        passed_over=passed_over(kernel, dtype) if attention == "auto" else {},
        norm="te" if kernel == "te" else "torch",
        optimizer=_library(Adam),
        grad_norm=_library(clip_grads.l2_norm_impl),
        rope_fusion=has_rope_fusion(kernel),
        gradient_accumulation_fusion=has_gradient_accumulation_fusion(),
        apex=find_apex(),
    )


def has_rope_fusion(kernel: str) -> bool:
    """Whether rotary embeddings of packed rows run in one kernel: Transformer Engine has it, and it
    reads `cu_seqlens` on the device, where the plain way reads them on the host in every layer."""
    return kernel == "te"


def has_gradient_accumulation_fusion() -> bool:
    """Whether Megatron's linear layers can add weight gradients to the main ones in the product.

    apex's extension has the kernel. Transformer Engine's layers have their own, but under one
    setting with the output layer, which is Megatron's and refuses it without the extension.
    """
    from megapack import cpu

    return (
        cpu.uses_cuda() and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    )


def _library(function: object) -> Library:
    root = str(getattr(function, "__module__", "")).partition(".")[0]
    libraries: dict[str, Library] = {
        "transformer_engine": "te",
        "transformer_engine_torch": "te",
        "apex": "apex",
        "amp_C": "apex",
    }
    return libraries.get(root, "torch")
