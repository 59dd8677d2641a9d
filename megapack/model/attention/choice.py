"""Which attention runs packed rows on this machine, and which optional kernels Megatron-Core takes.

Attention: Transformer Engine's, torch's varlen, or SDPA. Other kernels: Transformer Engine, apex or
torch.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from megapack.base.apex import Apex, find_apex
from megapack.base.choices import Attention, Dtype, Kernel
from megapack.errors import ConfigError
from megapack.ranks import cpu

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

    from megapack.model.attention.choice import choose_attention, passed_over

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
    from megapack.ranks import cpu

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


# Flash attention's kernels in torch begin with Ampere.
_LEAST_CAPABILITY = (8, 0)


def choose_attention(attention: Attention, dtype: Dtype = "bf16") -> Kernel:
    """The first of Transformer Engine, torch's varlen attention and per-sample SDPA that can run.

    Args:
        attention: one of them to have that or an error; "auto" for the first that can run.
        dtype: of activations. Fused kernels take bf16; in fp32 "auto" is SDPA.

    Raises:
        ConfigError: the kernel that is asked for cannot run here, and why.
    """
    if attention == "auto":
        return next(kernel for kernel in get_args(Kernel) if obstacle(kernel, dtype) is None)
    reason = obstacle(attention, dtype, forced=True)
    if reason is not None:
        raise ConfigError(
            f"model.attention={attention} cannot run here: {reason}; set model.attention=auto "
            "or sdpa"
        )
    return attention


def passed_over(kernel: Kernel, dtype: Dtype = "bf16") -> dict[str, str]:
    """Why "auto" passes over each kernel that it prefers to this one."""
    kernels = get_args(Kernel)
    found = {name: obstacle(name, dtype) for name in kernels[: kernels.index(kernel)]}
    return {name: reason for name, reason in found.items() if reason is not None}


def obstacle(kernel: Kernel, dtype: Dtype = "bf16", *, forced: bool = False) -> str | None:
    """Why a kernel cannot run here; None if it can.

    Args:
        forced: it was asked for by name. Transformer Engine then runs in fp32 too, where it pads
            every sample to the longest.
    """
    if kernel == "sdpa":
        return None
    if not cpu.uses_cuda():
        return "the device is not CUDA"
    if dtype == "fp32" and not (kernel == "te" and forced):
        return "its fused kernels take bf16, model.dtype is fp32"
    return _te_obstacle() if kernel == "te" else _varlen_obstacle()


def _te_obstacle() -> str | None:
    if importlib.util.find_spec("transformer_engine") is None:
        return "the package transformer-engine is not installed (megapack[te])"
    from megatron.core.extensions.transformer_engine import HAVE_TE

    if not HAVE_TE:
        return (
            "transformer_engine is installed and does not import; `python -c 'import "
            "transformer_engine.pytorch'` says why"
        )
    return None


def _varlen_obstacle() -> str | None:
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return f"torch {torch.__version__} has no varlen attention, 2.10 and later have"
    if not torch.backends.cuda.is_flash_attention_available():
        return "torch was built without flash attention"
    capability = torch.cuda.get_device_capability()
    if capability < _LEAST_CAPABILITY:
        return "the GPU has compute capability {}.{}, it needs 8.0".format(*capability)
    return None
