"""torch's CUDA device, sent to the CPU."""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib.util
import logging
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megapack.cpu.groups import over_gloo, padded_all_gather, padded_reduce_scatter
from megapack.cpu.megatron import AFTER_IMPORT
from megapack.cpu.streams import HostEvent, NoStream
from megapack.cpu.triton import WithoutTriton
from megapack.errors import ConfigError

logger = logging.getLogger(__name__)

_FACTORIES = (
    *("empty", "empty_like", "empty_strided", "full", "full_like", "zeros", "zeros_like"),
    *("ones", "ones_like", "eye", "arange", "linspace", "tensor", "as_tensor"),
    *("rand", "rand_like", "randint", "randn", "randn_like", "randperm"),
)
_USED_MEMORY = (
    *("memory_allocated", "memory_reserved", "device_memory_used"),
    *("max_memory_allocated", "max_memory_reserved"),
)
_MARKER = "_megapack_cpu"
# Blackwell's. Megatron-LM asks for CUDA_DEVICE_MAX_CONNECTIONS=1 on earlier ones.
_DEFAULT_CAPABILITY = (10, 0)


def enabled() -> bool:
    """Whether `enable` was called in this process."""
    return hasattr(torch.cuda, _MARKER)


def uses_cuda() -> bool:
    """Whether models run on CUDA: the machine has it and `enable` was not called."""
    return torch.cuda.is_available() and not enabled()


def enable(capability: tuple[int, int] | None = None) -> None:
    """Send Megatron's CUDA calls to the CPU, for the rest of this process.

    Idempotent. Call it before the model is built. A CUDA device of the machine stays unused, but
    tensors that other code puts on it explicitly through an index keep working. NCCL is read as
    gloo. Memory statistics are 0, and timers of CUDA events are the host's clock.

    Args:
        capability: the compute capability of the GPU that is rehearsed: (9, 0) for Hopper, (10, 0),
            the default, for Blackwell. Libraries ask once and keep the answer.

    Raises:
        ConfigError: the process rehearses another one already.
    """
    if enabled():
        rehearsed = torch.cuda.get_device_capability()
        if capability not in (None, rehearsed):
            raise ConfigError(
                f"megapack.cpu.enable(capability={capability}): this process rehearses a GPU of "
                f"compute capability {rehearsed}; set it in the first call of enable"
            )
        return
    if torch.cuda.is_available():
        logger.warning("device: cpu was asked for, so the CUDA device of this machine stays unused")
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = _identity  # type: ignore[method-assign]
    torch.Tensor.to = _to_cpu(torch.Tensor.to)  # type: ignore[method-assign]
    torch.Tensor.type = _cuda_type_name(torch.Tensor.type)  # type: ignore[method-assign]
    torch.nn.Module.cuda = _identity  # type: ignore[method-assign]
    _redirect_process_groups()
    _redirect_cuda_module(capability or _DEFAULT_CAPABILITY)
    _compile_nothing()
    from wrapt import register_post_import_hook

    # Right after the module's import; at once if it is imported.
    for module, redirect in AFTER_IMPORT.items():
        register_post_import_hook(redirect, module)
    if importlib.util.find_spec("triton") is None:
        sys.meta_path.insert(0, WithoutTriton())
    setattr(torch.cuda, _MARKER, True)


def _compile_nothing() -> None:
    """Run Megatron's small fused functions as they are: a C++ compiler would take seconds for each,
    again for every few lengths of rows. TORCHDYNAMO_DISABLE=0 compiles."""
    is_off = os.environ.setdefault("TORCHDYNAMO_DISABLE", "1") == "1"
    # Only functions that are decorated from now on read the variable.
    if is_off and "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].config.disable = True


def _redirect_process_groups() -> None:
    dist.all_gather = padded_all_gather(dist.all_gather)
    dist.reduce_scatter = padded_reduce_scatter(dist.reduce_scatter)
    for name in ("init_process_group", "new_group"):
        make = over_gloo(getattr(dist, name))
        setattr(dist, name, make)
        setattr(dist.distributed_c10d, name, make)


def _redirect_cuda_module(capability: tuple[int, int]) -> None:
    """Streams that run in order, and what a recipe asks of its device: a GPU per local rank, with
    the host's memory, all free."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    properties = types.SimpleNamespace(
        name="cpu",
        major=capability[0],
        # torch.compile reads the name of the architecture where torch is built without CUDA.
        gcnArchName="cpu",
        minor=capability[1],
        total_memory=memory,
        multi_processor_count=os.cpu_count(),
    )
    answers: dict[str, Any] = {
        **dict.fromkeys(("set_device", "set_stream", "synchronize", "empty_cache")),
        **dict.fromkeys(_USED_MEMORY, 0),
        "reset_peak_memory_stats": None,
        "current_device": torch.device("cpu"),
        "is_current_stream_capturing": False,
        "is_bf16_supported": True,
        "get_device_properties": properties,
        "get_device_capability": capability,
        "get_device_name": properties.name,
        "mem_get_info": (memory, memory),
    }
    replacements: dict[str, Callable[..., Any]] = {
        # A function for each: torch.compile has a rule for some of them, and a table by function.
        **{name: _always(answer) for name, answer in answers.items()},
        "current_stream": lambda device=None: NoStream(),
        "default_stream": lambda device=None: NoStream(),
        "stream": lambda stream: contextlib.nullcontext(),
        "device": lambda device: contextlib.nullcontext(),
        "Stream": NoStream,
        "Event": HostEvent,
        "manual_seed": torch.default_generator.manual_seed,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "device_count": lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "memory_stats": lambda device=None: collections.defaultdict(int),
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
    torch.cuda.random.get_rng_state = replacements["get_rng_state"]
    torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop = _always(0), _always(0)


def _always(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


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
