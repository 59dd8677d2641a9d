"""Megatron-Core on a machine without CUDA.

Megatron-Core names the CUDA device in its schedules, buffers, random states and optimizers.
`enable` sends each of those calls to the CPU, so that the real package runs over gloo, including
tensor, sequence, pipeline and data parallelism, the distributed optimizer and gradient clipping.
Only `device: cpu` switches it on.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

logger = logging.getLogger(__name__)

_FACTORIES = (
    *("empty", "empty_like", "empty_strided", "full", "full_like", "zeros", "zeros_like"),
    *("ones", "ones_like", "eye", "arange", "linspace", "tensor", "as_tensor"),
    *("rand", "rand_like", "randint", "randn", "randn_like", "randperm"),
)
_MARKER = "_megapack_cpu"


def enabled() -> bool:
    """Whether `enable` was called in this process."""
    return hasattr(torch.cuda, _MARKER)


def uses_cuda() -> bool:
    """Whether models run on CUDA: the machine has it and `enable` was not called."""
    return torch.cuda.is_available() and not enabled()


def enable() -> None:
    """Send Megatron-Core's CUDA calls to the CPU, for the rest of this process.

    Idempotent. Call it before the model is built. A CUDA device of the machine stays unused, but
    tensors that other code puts on it explicitly through an index keep working.
    """
    if enabled():
        return
    if torch.cuda.is_available():
        logger.warning("device: cpu was asked for, so the CUDA device of this machine stays unused")
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = _identity  # type: ignore[method-assign]
    torch.Tensor.to = _to_cpu(torch.Tensor.to)  # type: ignore[method-assign]
    torch.Tensor.type = _cuda_type_name(torch.Tensor.type)  # type: ignore[method-assign]
    torch.nn.Module.cuda = _identity  # type: ignore[method-assign]
    dist.all_gather = _padded_all_gather(dist.all_gather)
    dist.reduce_scatter = _padded_reduce_scatter(dist.reduce_scatter)
    _redirect_cuda_module()
    setattr(torch.cuda, _MARKER, True)


def _redirect_cuda_module() -> None:
    cpu = torch.device("cpu")
    replacements: dict[str, Callable[..., Any]] = {
        "current_device": lambda: cpu,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "current_stream": lambda device=None: _NoStream(),
        "default_stream": lambda device=None: _NoStream(),
        "Stream": _NoStream,
        "manual_seed": torch.default_generator.manual_seed,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
    torch.cuda.random.get_rng_state = replacements["get_rng_state"]
    # Megatron's tracker sets the state through CUDA's default generators, which do not exist here.
    from megatron.core.tensor_parallel import random as megatron_random

    def set_state(state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(state)

    def get_state(device: Any = None, clone: bool = False, graph_safe: bool = False) -> Any:
        return torch.get_rng_state()

    megatron_random._set_cuda_rng_state = set_state
    megatron_random._get_cuda_rng_state = get_state
    _redirect_experts()
    _redirect_optimizer()


def _redirect_optimizer() -> None:
    """Use torch's optimizer: those of Transformer Engine and apex only support CUDA tensors."""
    from megatron.core import optimizer, utils
    from megatron.core.optimizer import clip_grads, distrib_optimizer
    from megatron.core.optimizer import optimizer as base

    optimizer.Adam = torch.optim.AdamW
    optimizer.USING_PYTORCH_OPTIMIZER = True
    distrib_optimizer.HAVE_APEX_OR_TE = False
    clip_grads.l2_norm_impl = utils.local_multi_tensor_l2_norm
    for module in (clip_grads, base):
        module.multi_tensor_applier = utils.local_multi_tensor_applier
        module.multi_tensor_scale_impl = utils.local_multi_tensor_scale


def _redirect_experts() -> None:
    from megatron.core.transformer.moe import token_dispatcher

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        """Split sizes as numpy; Megatron converts only CUDA tensors."""
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = to_host


def _padded_all_gather(all_gather: Callable[..., Any]) -> Callable[..., Any]:
    """`all_gather` that also takes parts of different lengths, as NCCL does; gloo refuses them.

    Experts under tensor parallelism gather each rank's tokens: parts [5, h] and [3, h] travel as
    two of [5, h]. Every rank knows all lengths, because it allocates all parts. Asynchronous calls
    are passed on as they are.
    """

    @functools.wraps(all_gather)
    def gather(tensor_list: list[Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("async_op") or len({part.shape for part in tensor_list}) <= 1:
            return all_gather(tensor_list, tensor, *args, **kwargs)
        padded = _padded([tensor, *tensor_list])
        all_gather(padded[1:], padded[0], *args, **kwargs)
        for part, received in zip(tensor_list, padded[1:], strict=True):
            part.copy_(received[: len(part)])
        return None

    return gather


def _padded_reduce_scatter(reduce_scatter: Callable[..., Any]) -> Callable[..., Any]:
    """`reduce_scatter` that also takes parts of different lengths, see `_padded_all_gather`."""

    @functools.wraps(reduce_scatter)
    def scatter(output: Tensor, input_list: list[Tensor], *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("async_op") or len({part.shape for part in input_list}) <= 1:
            return reduce_scatter(output, input_list, *args, **kwargs)
        padded = _padded([output, *input_list])
        reduce_scatter(padded[0], padded[1:], *args, **kwargs)
        output.copy_(padded[0][: len(output)])
        return None

    return scatter


def _padded(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies that are as long in the first dimension as the longest tensor, filled with zeros."""
    longest = max(map(len, tensors))
    copies = [tensor.new_zeros(longest, *tensor.shape[1:]) for tensor in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy[: len(tensor)] = tensor.detach()
    return copies


class _NoStream:
    """Stands in for a CUDA stream: the CPU runs everything in order.

    A class, because other packages subclass `torch.cuda.Stream` or name it in annotations.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes what a CUDA stream takes."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Any = None) -> _NoStream:
        """An event that has happened already."""
        return self

    def synchronize(self) -> None:
        """Nothing to wait for."""


def _identity(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def build(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        # Pinned memory, from which a GPU copies, needs one.
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return build


def _to_cpu(to: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(to)
    def move(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args and _is_cuda(args[0]):
            args = ("cpu", *args[1:])
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return to(self, *args, **kwargs)

    return move


def _cuda_type_name(tensor_type: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(tensor_type)
    def name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # Megatron's optimizers compare `tensor.type()` with 'torch.cuda.FloatTensor'.
        if args or kwargs:
            return tensor_type(self, *args, **kwargs)
        return tensor_type(self).replace("torch.", "torch.cuda.", 1)

    return name
