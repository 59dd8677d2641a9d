"""Megatron on a machine without CUDA: Megatron-Core, and recipes of Megatron-LM as they are.

    torchrun --nproc-per-node 2 -m megapack run --cpu pretrain_gpt.py ARGS

Megatron-Core names the CUDA device in its schedules, buffers, random states and optimizers.
`enable` sends each of those calls to the CPU, so that the real package runs over gloo, including
tensor, sequence, pipeline and data parallelism, the distributed optimizer and gradient clipping.
Megatron-LM's `megatron.training` also asks for a device's memory and properties, starts NCCL and
compiles kernels; it is served too. Names in modules of Megatron are replaced right after the
module's import, so the order of imports does not matter, and nothing is imported early.

`megapack run --cpu`, `device: cpu` in a configuration, or a call of `enable` switches it on.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import sys
import time
import types
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
# Blackwell's. Megatron-LM asks for CUDA_DEVICE_MAX_CONNECTIONS=1 on earlier ones.
_CAPABILITY = (10, 0)


def enabled() -> bool:
    """Whether `enable` was called in this process."""
    return hasattr(torch.cuda, _MARKER)


def uses_cuda() -> bool:
    """Whether models run on CUDA: the machine has it and `enable` was not called."""
    return torch.cuda.is_available() and not enabled()


def enable() -> None:
    """Send Megatron's CUDA calls to the CPU, for the rest of this process.

    Idempotent. Call it before the model is built. A CUDA device of the machine stays unused, but
    tensors that other code puts on it explicitly through an index keep working. NCCL is read as
    gloo. Memory statistics are 0, and timers of CUDA events are the host's clock.
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
    _redirect_process_groups()
    _redirect_cuda_module()
    _redirect_device_facts()
    for module, redirect in _AFTER_IMPORT.items():
        _after_import(module, redirect)
    if importlib.util.find_spec("triton") is None:
        sys.meta_path.insert(0, _WithoutTriton())
    setattr(torch.cuda, _MARKER, True)


def _redirect_process_groups() -> None:
    dist.all_gather = _padded_all_gather(dist.all_gather)
    dist.reduce_scatter = _padded_reduce_scatter(dist.reduce_scatter)
    for name in ("init_process_group", "new_group"):
        over_gloo = _over_gloo(getattr(dist, name))
        setattr(dist, name, over_gloo)
        setattr(dist.distributed_c10d, name, over_gloo)


def _redirect_cuda_module() -> None:
    cpu = torch.device("cpu")
    replacements: dict[str, Callable[..., Any]] = {
        "current_device": lambda: cpu,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "current_stream": lambda device=None: _NoStream(),
        "default_stream": lambda device=None: _NoStream(),
        "set_stream": lambda stream: None,
        "stream": lambda stream: contextlib.nullcontext(),
        "Stream": _NoStream,
        "Event": _HostEvent,
        "manual_seed": torch.default_generator.manual_seed,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
    torch.cuda.random.get_rng_state = replacements["get_rng_state"]


def _redirect_device_facts() -> None:
    """What a recipe asks of its device: a GPU per local rank, with the host's memory, all free."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    properties = types.SimpleNamespace(
        name="cpu",
        major=_CAPABILITY[0],
        # torch.compile reads the name of the architecture where torch is built without CUDA.
        gcnArchName="cpu",
        minor=_CAPABILITY[1],
        total_memory=memory,
        multi_processor_count=os.cpu_count(),
    )
    facts: dict[str, Callable[..., Any]] = {
        "device_count": lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: _CAPABILITY,
        "get_device_name": lambda device=None: properties.name,
        "mem_get_info": lambda device=None: (memory, memory),
        "memory_stats": lambda device=None: collections.defaultdict(int),
        "reset_peak_memory_stats": lambda device=None: None,
    }
    for name in ("allocated", "reserved"):
        facts[f"memory_{name}"] = lambda device=None: 0
        facts[f"max_memory_{name}"] = lambda device=None: 0
    facts["device_memory_used"] = lambda device=None: 0
    for name, fact in facts.items():
        setattr(torch.cuda, name, fact)


def _after_import(name: str, redirect: Callable[[Any], None]) -> None:
    """Call `redirect(module)` right after the module's import; at once if it is imported."""
    from wrapt import register_post_import_hook

    register_post_import_hook(redirect, name)


def _redirect_random_states(random: Any) -> None:
    """Megatron's tracker sets states through CUDA's default generators, which do not exist here."""

    def set_state(state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(state)

    def get_state(device: Any = None, clone: bool = False, graph_safe: bool = False) -> Any:
        return torch.get_rng_state()

    random._set_cuda_rng_state = set_state
    random._get_cuda_rng_state = get_state


def _use_torchs_adam(optimizer: Any) -> None:
    """Transformer Engine's and apex's only support CUDA tensors."""
    optimizer.Adam = torch.optim.AdamW
    optimizer.USING_PYTORCH_OPTIMIZER = True


def _use_torchs_distributed_optimizer(distrib_optimizer: Any) -> None:
    distrib_optimizer.HAVE_APEX_OR_TE = False


def _use_local_scaling(module: Any) -> None:
    """Scale and measure lists of gradients by torch's operations."""
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


def _name_absent_gemm(moe_utils: Any) -> None:
    """Routers read a name that 0.16 binds only if Transformer Engine imports."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _use_compiled_helpers(utils: Any) -> None:
    """Keep data sets' helpers in C++ that are compiled already, as those of a wheel are."""
    compile_helpers = utils.compile_helpers

    @functools.wraps(compile_helpers)
    def compile_missing() -> None:
        if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
            compile_helpers()

    utils.compile_helpers = compile_missing


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
_AFTER_IMPORT: dict[str, Callable[[Any], None]] = {
    "megatron.core.tensor_parallel.random": _redirect_random_states,
    "megatron.core.optimizer": _use_torchs_adam,
    "megatron.core.optimizer.distrib_optimizer": _use_torchs_distributed_optimizer,
    "megatron.core.optimizer.clip_grads": _use_local_scaling,
    "megatron.core.optimizer.optimizer": _use_local_scaling,
    "megatron.core.transformer.moe.token_dispatcher": _keep_split_sizes,
    "megatron.core.transformer.moe.moe_utils": _name_absent_gemm,
    "megatron.core.datasets.utils": _use_compiled_helpers,
    "megatron.legacy.fused_kernels": _compile_no_kernels,
    "megatron.training.initialize": _start_without_cuda,
}


# Modules that define Triton kernels and are imported by every recipe. Since 0.19 they do without.
_NEED_TRITON = (
    "megatron.core.transformer.custom_layers.batch_invariant_kernels",
    "megatron.core.inference.contexts.fused_kv_append_kernel",
    "megatron.core.inference.contexts.attention_context.triton.tensor_ops",
)


class _WithoutTriton(importlib.abc.MetaPathFinder):
    """Imports modules with Triton kernels where Triton is absent; their kernels cannot run.

    Only these modules see the stand-in: torch asks for Triton too, and must not find it.
    """

    def __init__(self) -> None:
        self._searching = False

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _NEED_TRITON or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = functools.partial(  # type: ignore[method-assign]
                _execute_without_triton, execute
            )
        return spec


def _execute_without_triton(execute: Callable[[Any], None], module: Any) -> None:
    names = {name: _NoTriton(name) for name in ("triton", "triton.language")}
    vars(names["triton"])["language"] = names["triton.language"]
    sys.modules.update(names)
    try:
        execute(module)
    finally:
        for name in names:
            del sys.modules[name]


class _NoTriton(types.ModuleType):
    """Decorators that leave functions as they are, and types for annotations."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _no_kernel


def _no_kernel(*args: Any, **kwargs: Any) -> Any:
    is_decorator = len(args) == 1 and not kwargs and callable(args[0])
    return args[0] if is_decorator else _no_kernel


def _over_gloo(make_group: Callable[..., Any]) -> Callable[..., Any]:
    """`init_process_group` or `new_group`, with gloo where NCCL is asked for.

    gloo also serves "cpu:gloo,cuda:nccl". NCCL's options and a device go with NCCL.
    """

    @functools.wraps(make_group)
    def make(*args: Any, **kwargs: Any) -> Any:
        args = tuple("gloo" if _names_nccl(value) else value for value in args)
        if _names_nccl(kwargs.get("backend")):
            kwargs["backend"] = "gloo"
            kwargs.pop("pg_options", None)
        kwargs.pop("device_id", None)
        return make_group(*args, **kwargs)

    return make


def _names_nccl(value: Any) -> bool:
    return isinstance(value, str) and "nccl" in value.lower()


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

    def record_event(self, event: Any = None) -> Any:
        """An event that has happened already."""
        event = _HostEvent() if event is None else event
        event.record()
        return event

    def synchronize(self) -> None:
        """Nothing to wait for."""


class _HostEvent:
    """Stands in for a CUDA event: a time of the host's clock."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes what a CUDA event takes."""
        self._seconds = 0.0

    def record(self, stream: Any = None) -> None:
        """Note the time."""
        self._seconds = time.perf_counter()

    def elapsed_time(self, end_event: _HostEvent) -> float:
        """Milliseconds from this event to the other one."""
        return (end_event._seconds - self._seconds) * 1000

    def query(self) -> bool:
        """It has happened."""
        return True

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

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
