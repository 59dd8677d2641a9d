"""What a program asks torch about its GPU, answered for real CPU tensors with noted places.

Transformer Engine's Python names the CPU where it names CUDA on a GPU (`megapack.cpu.te.loader`).
So its modules are answered otherwise: each device that they name, and each that they are told, is
the GPU.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from torch import Tensor

from megapack import cpu, launch
from megapack.cpu.te import calls
from tests.rehearsal.device_ledger import DeviceLedger
from tests.rehearsal.places import Place, is_on_gpu, place_of, put

_FACTORIES = (
    *("empty", "empty_strided", "full", "zeros", "ones", "eye", "arange", "linspace"),
    *("rand", "randint", "randn", "randperm"),
    *("empty_like", "full_like", "zeros_like", "ones_like", "rand_like", "randn_like"),
)
_NEW = ("new_empty", "new_zeros", "new_ones", "new_full")
_OBJECTS = (
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
)
_REAL_DEVICE = torch.Tensor.device
_REAL_TO = torch.Tensor.to


@contextlib.contextmanager
def rehearsed_gpu() -> Iterator[DeviceLedger]:
    """Within the block, this process rehearses a run on GPUs over NCCL, and a ledger watches it.

    `megapack.cpu.uses_cuda` is true, so megapack's GPU branches run. In a job, call
    `megapack.cpu.enable((9, 0))` before the block, for a Hopper GPU, and `launch.start("cuda")` in
    it: gloo serves the groups that are asked for over NCCL. What `torch.compile` would compile runs
    as it is.
    """
    ledger = DeviceLedger()
    with contextlib.ExitStack() as stack:

        def replace(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        for name in _FACTORIES:
            replace(torch, name, _factory(getattr(torch, name), likes=name.endswith("_like")))
        for name in ("tensor", "as_tensor"):
            replace(torch, name, _from_data(getattr(torch, name), ledger))
        for name in _NEW:
            replace(Tensor, name, _factory(getattr(Tensor, name), likes=True))
        replace(Tensor, "new_tensor", _from_data(Tensor.new_tensor, ledger, follows=True))
        for name, value in _tensor_attributes(ledger).items():
            replace(Tensor, name, value)
        replace(torch.nn.Module, "cuda", lambda self, device=None: self._apply(_to_gpu))
        for name in ("synchronize", "Stream.synchronize", "Event.synchronize"):
            path = f"torch.cuda.{name}"
            owner = getattr(torch.cuda, name.partition(".")[0]) if "." in name else torch.cuda
            replace(owner, "synchronize", _waits(ledger, path))
        replace(torch.cuda, "current_device", _gpu)
        replace(cpu, "uses_cuda", lambda: True)
        replace(launch, "start", _start(launch.start))
        for name in ("init_process_group", "new_group"):
            makes_group = _makes_group(getattr(dist, name), ledger)
            replace(dist, name, makes_group)
            replace(dist.distributed_c10d, name, makes_group)
        for name in _OBJECTS:
            moves = _moves_objects(getattr(dist, name), ledger)
            replace(dist, name, moves)
            replace(dist.distributed_c10d, name, moves)
        replace(dist.Work, "wait", _without_copies(dist.Work.wait, ledger))
        # `cpu.enable` keeps split sizes where they are.
        replace(token_dispatcher, "maybe_move_tensor_to_cpu", moe_utils.maybe_move_tensor_to_cpu)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        replace(calls, "run", ledger.kernel)
        stack.enter_context(ledger)
        yield ledger


def _gpu() -> torch.device:
    """This rank's GPU. On CUDA `current_device` gives a number, which a CPU's `torch.device`
    refuses."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def _calls_from_te() -> bool:
    """Whether the caller of the calling function is Transformer Engine."""
    name = sys._getframe(2).f_globals.get("__name__", "")
    return str(name).startswith("transformer_engine.")


def _place_on(device: Any, *, from_te: bool = False) -> Place:
    if from_te or isinstance(device, int) or torch.device(device).type == "cuda":
        return Place.GPU
    return Place.HOST


def _to_gpu(tensor: Tensor) -> Tensor:
    return tensor.cuda()


def _factory(original: Callable[..., Any], *, likes: bool) -> Callable[..., Any]:
    """A factory that notes the place of its result.

    Args:
        likes: without a device the result is where the first argument is.
    """

    @functools.wraps(original)
    def make(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        place = place_of(args[0]) if likes else Place.HOST
        # Transformer Engine also names the index of a tensor's device, which is None on the CPU.
        from_te = "device" in kwargs and _calls_from_te()
        device = kwargs.pop("device", None)
        if from_te or device is not None:
            place = _place_on(device, from_te=from_te)
            if place is Place.HOST:
                kwargs["device"] = device
        made = original(*args, **kwargs)
        return put(made, Place.PINNED if pin_memory else place)

    return make


def _from_data(
    original: Callable[..., Any], ledger: DeviceLedger, *, follows: bool = False
) -> Callable[..., Any]:
    """`torch.tensor` and the like: the host's numbers are copied to a GPU, and the host waits.

    Args:
        follows: a method, without a device its result is where its tensor is.
    """

    @functools.wraps(original)
    def make(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Any:
        data = args[1] if follows else args[0]
        source = place_of(data) if isinstance(data, Tensor) else Place.HOST
        target = place_of(args[0]) if follows else source
        if device is not None:
            target = _place_on(device, from_te=_calls_from_te())
        made = original(*args, **kwargs)
        if made.numel():
            ledger.copy(target, source, non_blocking=False)
        if made is data and target is not source:
            made = made.clone()
        return put(made, Place.PINNED if pin_memory else target)

    return make


def _tensor_attributes(ledger: DeviceLedger) -> dict[str, Any]:
    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        wanted = _wanted(args, kwargs)
        device = wanted.pop("device")
        non_blocking = wanted.pop("non_blocking")
        source = place_of(self)
        if device is None:
            return _REAL_TO(self, **wanted)
        target = _place_on(device, from_te=_calls_from_te())
        if (target is Place.GPU) is (source is Place.GPU):
            return _REAL_TO(self, **wanted)
        # torch pins the result of an asynchronous copy to the host.
        pins = non_blocking and target is Place.HOST
        if self.numel():
            ledger.copy(target, source, non_blocking=non_blocking, pins=pins)
        moved = _REAL_TO(self, **{**wanted, "copy": True})
        return put(moved, Place.PINNED if pins else target)

    def cuda(self: Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> Tensor:
        return to(self, _gpu(), non_blocking=non_blocking, **kwargs)

    def to_host(self: Tensor, **kwargs: Any) -> Tensor:
        return to(self, "cpu", **kwargs)

    def pin_memory(self: Tensor, device: Any = None) -> Tensor:
        return self if place_of(self) is Place.PINNED else put(self.clone(), Place.PINNED)

    def device(self: Tensor) -> torch.device:
        return _gpu() if is_on_gpu(self) and not _calls_from_te() else _REAL_DEVICE.__get__(self)

    def is_cpu(self: Tensor) -> bool:
        return is_on_gpu(self) is _calls_from_te()

    def read(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        # Reads memory without an operation that a dispatch mode could see.
        @functools.wraps(original)
        def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            if is_on_gpu(self):
                ledger.note("wait" if name == "tolist" else "mixed", name)
            return original(self, *args, **kwargs)

        return method

    return {
        "to": to,
        "cuda": cuda,
        "cpu": to_host,
        "pin_memory": pin_memory,
        "is_pinned": lambda self, device=None: place_of(self) is Place.PINNED,
        "device": property(device),
        "is_cuda": property(is_on_gpu),
        "is_cpu": property(is_cpu),
        "get_device": lambda self: _gpu().index if is_on_gpu(self) else -1,
        "record_stream": lambda self, stream: None,
        "tolist": read("tolist", Tensor.tolist),
        # CUDA refuses.
        "numpy": read("numpy", Tensor.numpy),
    }


def _wanted(args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `Tensor.to` by name; those that are None or absent are left out, apart from
    `device` and `non_blocking`."""
    given: dict[str, Any] = {"device": None, "non_blocking": False, **kwargs}
    rest = list(args)
    other = given.pop("other", None)
    if rest and isinstance(rest[0], Tensor):
        other = rest.pop(0)
    if other is not None:
        given |= {"device": other.device, "dtype": other.dtype}
    elif rest and isinstance(rest[0], torch.dtype):
        given["dtype"] = rest.pop(0)
    elif rest:
        given["device"] = rest.pop(0)
        if rest and not isinstance(rest[0], bool):
            given["dtype"] = rest.pop(0)
    given |= dict(zip(("non_blocking", "copy"), rest, strict=False))
    keeps = ("device", "non_blocking")
    return {name: value for name, value in given.items() if name in keeps or value is not None}


def _waits(ledger: DeviceLedger, name: str) -> Callable[..., None]:
    def synchronize(*args: Any, **kwargs: Any) -> None:
        ledger.note("wait", name)

    return synchronize


def _start(start: Callable[[Any], torch.device]) -> Callable[[Any], torch.device]:
    """`launch.start` that finds a GPU, and asks for NCCL."""

    @functools.wraps(start)
    def started(device: Any) -> torch.device:
        index = _gpu().index
        with (
            mock.patch.object(torch.cuda, "is_available", return_value=True),
            mock.patch.object(torch.cuda, "current_device", return_value=index),
        ):
            return start("cuda")

    return started


def _makes_group(make: Callable[..., Any], ledger: DeviceLedger) -> Callable[..., Any]:
    """A function that makes a group, and notes those that were asked for over gloo."""
    place = 0 if make.__name__ == "init_process_group" else 2

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        backend = kwargs.get("backend", args[place] if len(args) > place else None)
        result = make(*args, **kwargs)
        group = dist.group.WORLD if result is None else result
        if backend == "gloo" and hasattr(group, "group_name"):
            ledger.host_groups.add(group.group_name)
        return result

    return made


def _without_copies(wait: Callable[..., Any], ledger: DeviceLedger) -> Callable[..., Any]:
    """`Work.wait`, in which gloo copies some results from buffers of its own; NCCL's has nothing to
    do for the host."""

    def waited(*args: Any, **kwargs: Any) -> Any:
        with ledger.quiet():
            return wait(*args, **kwargs)

    return waited


def _moves_objects(move: Callable[..., Any], ledger: DeviceLedger) -> Callable[..., Any]:
    @functools.wraps(move)
    def moved(*args: Any, **kwargs: Any) -> Any:
        groups = (v for v in (*args, *kwargs.values()) if isinstance(v, dist.ProcessGroup))
        with ledger.moving_objects(move.__name__, next(groups, None)):
            return move(*args, **kwargs)

    return moved
