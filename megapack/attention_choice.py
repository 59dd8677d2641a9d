"""Which attention runs packed rows on this machine: Transformer Engine's, torch's varlen, SDPA."""

from __future__ import annotations

import importlib.util
from typing import get_args

import torch

from megapack import cpu
from megapack.choices import Attention, Dtype, Kernel
from megapack.errors import ConfigError

# Flash attention's kernels in torch begin with Ampere.
_LEAST_CAPABILITY = (8, 0)


def choose_attention(attention: Attention, dtype: Dtype = "bf16") -> Kernel:
    """The first of Transformer Engine, torch's varlen attention and per-sample SDPA that can run.

    Args:
        attention: one of them to have that or an error; "auto" for the first that can run.
        dtype: of activations. Fused kernels take bf16; in fp32 "auto" is SDPA.

    Raises:
        ConfigError: what is asked for cannot run here, and what is missing.
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
    """Why "auto" does not take each kernel that it would rather have than this one."""
    kernels = get_args(Kernel)
    found = {name: obstacle(name, dtype) for name in kernels[: kernels.index(kernel)]}
    return {name: reason for name, reason in found.items() if reason is not None}


def obstacle(kernel: Kernel, dtype: Dtype = "bf16", *, forced: bool = False) -> str | None:
    """What keeps a kernel from running here; None where nothing does.

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
