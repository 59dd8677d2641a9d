"""What changes in modules of Megatron, right after the import of each."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from megapack.te_finder import python_alone


def runs_te() -> bool:
    """Whether Transformer Engine's Python runs here on stand-ins of its kernels, see `cpu.te`."""
    return python_alone() is not None


def _redirect_random_states(random: Any) -> None:
    """Megatron's tracker sets states through CUDA's default generators, which do not exist here."""

    def set_state(state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(state)

    def get_state(device: Any = None, clone: bool = False, graph_safe: bool = False) -> Any:
        return torch.get_rng_state()

    random._set_cuda_rng_state = set_state
    random._get_cuda_rng_state = get_state


def _use_torchs_adam(optimizer: Any) -> None:
    """Transformer Engine's and apex's only support CUDA tensors, but for stand-ins of kernels."""
    if runs_te():
        return
    optimizer.Adam = torch.optim.AdamW
    optimizer.USING_PYTORCH_OPTIMIZER = True


def _use_torchs_distributed_optimizer(distrib_optimizer: Any) -> None:
    if not runs_te():
        distrib_optimizer.HAVE_APEX_OR_TE = False


def _use_local_scaling(module: Any) -> None:
    """Scale and measure lists of gradients by torch's operations."""
    if runs_te():
        return
    from megatron.core import utils

    module.multi_tensor_applier = utils.local_multi_tensor_applier
    module.multi_tensor_scale_impl = utils.local_multi_tensor_scale
    if hasattr(module, "l2_norm_impl"):
        module.l2_norm_impl = utils.local_multi_tensor_l2_norm


def _keep_split_sizes(token_dispatcher: Any) -> None:
    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        """Split sizes as numpy; Megatron converts only CUDA tensors."""
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = to_host


def _fuse_gradient_accumulation(layers: Any) -> None:
    """Megatron's own linear layers add weight gradients to `main_grad` by an extension of apex."""
    name = "fused_weight_gradient_mlp_cuda"
    if layers._grad_accum_fusion_available:
        return
    extension = types.ModuleType(name)
    extension.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(extension).update(
        wgrad_gemm_accum_fp32=_add_weight_gradient, wgrad_gemm_accum_fp16=_add_weight_gradient
    )
    # Embeddings that put off their gradients import it when they compute them.
    sys.modules[name] = extension
    layers.fused_weight_gradient_mlp_cuda = extension
    layers._grad_accum_fusion_available = True


def _add_weight_gradient(
    input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor
) -> None:
    """main_grad [out, in] += grad_output [tokens, out]^T input [tokens, in]."""
    main_grad += grad_output.t().matmul(input)


def _name_absent_gemm(moe_utils: Any) -> None:
    """Routers read a name that 0.16 binds only if Transformer Engine imports."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _use_compiled_helpers(module: Any) -> None:
    """Keep data sets' helpers in C++ that are compiled already, as those of a wheel are."""
    compile_helpers = module.compile_helpers

    @functools.wraps(compile_helpers)
    def compile_missing() -> None:
        if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
            compile_helpers()

    module.compile_helpers = compile_missing


def _know_no_inference_layers(inference_layers: Any) -> None:
    """Layers of multi-token prediction ask for classes that are none without Transformer Engine.

    Read in main of August 2026, where the question raises TypeError.
    """
    for name in ("InferenceColumnParallelLinear", "InferenceLayerNormColumnParallelLinear"):
        if not isinstance(getattr(inference_layers, name, object), type):
            setattr(inference_layers, name, type(name, (), {}))


def _compile_no_kernels(fused_kernels: Any) -> None:
    fused_kernels.load = lambda args: None


def _start_without_cuda(initialize: Any) -> None:
    """`initialize_megatron` without its question for CUDA, and without warming up fused kernels."""
    initialize_megatron = initialize.initialize_megatron

    @functools.wraps(initialize_megatron)
    def without_cuda(*args: Any, **kwargs: Any) -> Any:
        return initialize_megatron(*args, **{**kwargs, "allow_no_cuda": True})

    initialize.initialize_megatron = without_cuda
    initialize.set_jit_fusion_options = lambda *args, **kwargs: None


# Module -> what changes in it.
AFTER_IMPORT: dict[str, Callable[[Any], None]] = {
    "megatron.core.tensor_parallel.random": _redirect_random_states,
    "megatron.core.optimizer": _use_torchs_adam,
    "megatron.core.optimizer.distrib_optimizer": _use_torchs_distributed_optimizer,
    "megatron.core.optimizer.clip_grads": _use_local_scaling,
    "megatron.core.optimizer.optimizer": _use_local_scaling,
    "megatron.core.tensor_parallel.inference_layers": _know_no_inference_layers,
    "megatron.core.tensor_parallel.layers": _fuse_gradient_accumulation,
    "megatron.core.transformer.moe.token_dispatcher": _keep_split_sizes,
    "megatron.core.transformer.moe.moe_utils": _name_absent_gemm,
    "megatron.core.datasets.utils": _use_compiled_helpers,
    "megatron.legacy.fused_kernels": _compile_no_kernels,
    "megatron.training.initialize": _start_without_cuda,
}
