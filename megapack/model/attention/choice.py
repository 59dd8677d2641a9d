"""The attention kernel for packed rows on this machine, and the other kernels of Megatron-Core.

Attention is Transformer Engine's, torch's varlen attention or torch's SDPA. Norms, Adam and
gradient norms are Transformer Engine's, apex's or torch's.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from megapack import cpu
from megapack.base.choices import Attention, Dtype, Kernel
from megapack.errors import ConfigError
from megapack.model.attention.te_backend import AttentionSizes, te_obstacle
from megapack.model.attention.varlen import has_varlen, heads_obstacle
from megapack.model.recurrent.choice import recurrent_kernels

# Compute capability of Ampere (A100: 8.0), the first with flash attention kernels in torch.
_MIN_CAPABILITY = (8, 0)
_NO_TE_ON_CPU = (
    "the device is not CUDA, and without CUDA Transformer Engine runs as its Python alone, without "
    "its compiled part; pip install transformer-engine einops"
)


@dataclass(frozen=True)
class Kernels:
    """The kernels that run a model."""

    attention: Kernel
    text: str
    """One line for the log at the start of a run."""

    def __str__(self) -> str:
        return self.text


def find_kernels(
    attention: Attention = "auto",
    dtype: Dtype = "bf16",
    sizes: AttentionSizes | None = None,
    *,
    layer_pattern: str | None = None,
) -> Kernels:
    """The kernels of a model with this `ModelConfig.attention` and `dtype` on this machine.

    Args:
        attention, dtype, sizes: see `choose_attention`.
        layer_pattern: see `ModelConfig`.

    Raises:
        ConfigError: the requested attention cannot run here.
    """
    from megatron.core.optimizer import Adam, clip_grads

    kernel = choose_attention(attention, dtype, sizes)
    others = passed_over(kernel, dtype, sizes) if attention == "auto" else {}
    reasons = "".join(f"; not {name}: {why}" for name, why in others.items())
    recurrent = recurrent_kernels(layer_pattern or "")
    text = (
        f"attention {kernel}, norms {'te' if kernel == 'te' else 'torch'}, "
        f"Adam {_library(Adam)}, gradient norm {_library(clip_grads.l2_norm_impl)}, "
        f"{'fused' if has_rope_fusion() else 'unfused'} rotary embeddings"
        f"{reasons}{recurrent and f'; {recurrent}'}"
    )
    return Kernels(kernel, text)


def has_rope_fusion() -> bool:
    """Whether rotary embeddings run in one kernel, with every attention kernel.

    The kernel is Transformer Engine's.
    """
    from megatron.core.models.common.embeddings import rope_utils

    has_kernels = cpu.uses_cuda() or cpu.runs_te()
    return has_kernels and rope_utils.fused_apply_rotary_pos_emb is not None


def choose_attention(
    attention: Attention, dtype: Dtype = "bf16", sizes: AttentionSizes | None = None
) -> Kernel:
    """The attention kernel of a model on this machine.

    Args:
        attention: a kernel, or "auto" for the first of Transformer Engine, torch's varlen attention
            and per-sample SDPA that can run.
        dtype: dtype of activations. Fused kernels need bf16; with fp32 "auto" is SDPA.
        sizes: of the model's attention; Transformer Engine is asked what it would run for them.
            None: it is not asked.

    Raises:
        ConfigError: the requested kernel cannot run here; the message says why.
    """
    if attention == "auto":
        return next(k for k in get_args(Kernel) if obstacle(k, dtype, sizes) is None)
    reason = obstacle(attention, dtype, sizes, forced=True)
    if reason is not None:
        raise ConfigError(
            f"model.attention={attention} cannot run here: {reason}; set model.attention=auto "
            "or sdpa"
        )
    return attention


def packed_kernel(
    dtype: Dtype = "bf16", sizes: AttentionSizes | None = None
) -> Literal["varlen", "sdpa"]:
    """The kernel of rows that Transformer Engine's attention does not run."""
    return "sdpa" if obstacle("varlen", dtype, sizes) else "varlen"


def passed_over(
    kernel: Kernel, dtype: Dtype = "bf16", sizes: AttentionSizes | None = None
) -> dict[str, str]:
    """Kernels that "auto" prefers to this one -> why each cannot run."""
    kernels = get_args(Kernel)
    reasons = {name: obstacle(name, dtype, sizes) for name in kernels[: kernels.index(kernel)]}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def obstacle(
    kernel: Kernel,
    dtype: Dtype = "bf16",
    sizes: AttentionSizes | None = None,
    *,
    forced: bool = False,
) -> str | None:
    """Why a kernel cannot run here; None if it can.

    Args:
        sizes: see `choose_attention`.
        forced: the user chose the kernel by name. Transformer Engine then also runs in fp32, where
            it pads every sample to the longest, and on the CPU, if `cpu.runs_te`.
    """
    if kernel == "sdpa":
        return None
    if sizes is not None and sizes.is_sparse:
        return "it has no sparse attention (model.indexer_top_k)"
    if sizes is not None and sizes.is_capped and kernel == "varlen":
        return "it does not cap scores (model.attention_score_cap)"
    if not cpu.uses_cuda():
        if not (kernel == "te" and forced):
            return "the device is not CUDA"
        if not cpu.runs_te():
            return _NO_TE_ON_CPU
    if dtype == "fp32" and not (kernel == "te" and forced):
        return "its fused kernels take bf16, model.dtype is fp32"
    if kernel == "varlen":
        return _varlen_obstacle(sizes)
    reason = _te_missing()
    if reason is None and sizes is not None and dtype == "bf16":
        # The same kernels run all numbers of ranks above 1.
        reason = te_obstacle(dataclasses.replace(sizes, most_cp=None))
        reason = reason or te_obstacle(sizes.widest)
    return reason


def _library(function: object) -> str:
    """Whose a function is: te, apex or torch."""
    root = str(getattr(function, "__module__", "")).partition(".")[0]
    libraries = {
        "transformer_engine": "te",
        "transformer_engine_torch": "te",
        "apex": "apex",
        "amp_C": "apex",
    }
    return libraries.get(root, "torch")


def _te_missing() -> str | None:
    if importlib.util.find_spec("transformer_engine") is None:
        return "the package transformer-engine[core_cu13,pytorch] is not installed"
    from megatron.core.extensions.transformer_engine import HAVE_TE

    if not HAVE_TE:
        return (
            "transformer_engine is installed and does not import; `python -c 'import "
            "transformer_engine.pytorch'` says why"
        )
    return None


def _varlen_obstacle(sizes: AttentionSizes | None) -> str | None:
    if not has_varlen():
        return f"torch {torch.__version__} has no such varlen attention, 2.11 and later have"
    if not torch.backends.cuda.is_flash_attention_available():
        return "torch was built without flash attention"
    capability = torch.cuda.get_device_capability()
    if capability < _MIN_CAPABILITY:
        return "the GPU has compute capability {}.{}, it needs 8.0".format(*capability)
    return heads_obstacle([kind.head_width for kind in sizes.kinds] if sizes else [])
