"""Notes of what a rank issues on the process groups that a GPU run makes with NCCL.

Methods of torch's `ProcessGroup` and `Work` are replaced: every function of `torch.distributed`
ends in them, also one that a module imported by name before, and in any thread. A group is left out
if it is asked for with backend "gloo", which a GPU run has for its CPU tensors as well. Jobs on a
CPU have gloo in place of NCCL as their default backend; `megapack.cpu` reads "nccl" as gloo.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work, distributed_c10d

from megapack.cpu import groups
from tests.rehearsal.notes import ALL_TO_ALL, RANK_FILE, RECEIVE, SEND, issued, line, waited

DELAY_SEED = "MEGAPACK_TEST_DELAY_SEED"
"""An integer: ranks sleep before a part of their operations, so that they meet in other orders."""
_MAX_DELAY_S = 0.004

_ROOT = Path(__file__).resolve().parents[2]
_SITE_FRAMES = 3
_SKIPPED = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
_LIBRARIES = f"{os.sep}site-packages{os.sep}"

# Method -> kind.
_COLLECTIVES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "barrier": "barrier",
    "gather": "gather",
    "scatter": "scatter",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "all_gather_single": "all_gather",
    "_allgather_base": "all_gather",
    "all_gather_single_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single_coalesced": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall": ALL_TO_ALL,
    "alltoall_base": ALL_TO_ALL,
    "all_to_all_single": ALL_TO_ALL,
}
_P2P = {"send": SEND, "recv": RECEIVE, "recv_anysource": RECEIVE}
METHODS = (*_COLLECTIVES, *_P2P)
"""Methods of ProcessGroup that issue an operation; the names differ between versions of torch."""


_THREAD = threading.local()
"""Of each thread: `batch`, the unit of the batch that it issues; `asks_nccl`; `is_unchecked`."""


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Operations of the block are left out.

    These are a transport that needs gloo on a machine with GPUs as well, or a fault after which no
    rank uses its process groups any more.
    """
    with _set("is_unchecked", True):
        yield


@contextlib.contextmanager
def _set(name: str, value: Any) -> Iterator[None]:
    setattr(_THREAD, name, value)
    try:
        yield
    finally:
        delattr(_THREAD, name)


def install(folder: Path, rank: int) -> None:
    """Note this process's operations in a file of the folder, for the rest of its life."""
    recorder = _Recorder(folder / RANK_FILE.format(rank), rank)
    for method, kind in {**_COLLECTIVES, **_P2P}.items():
        if original := getattr(ProcessGroup, method, None):
            setattr(ProcessGroup, method, recorder.noting(original, method, kind))
    Work.wait = recorder.waiting(Work.wait)
    Work.synchronize = recorder.waiting(Work.synchronize)
    for module in (dist, distributed_c10d):
        module.batch_isend_irecv = recorder.batching(module.batch_isend_irecv)
        module.init_process_group = recorder.initializing(module.init_process_group)
    distributed_c10d._new_group_with_tag = recorder.making(distributed_c10d._new_group_with_tag)
    groups._names_nccl = _noting_nccl(groups._names_nccl)


def _noting_nccl(names_nccl: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """What `megapack.cpu` asks of each argument before it reads "nccl" as "gloo"."""

    def names(value: Any) -> bool:
        if found := names_nccl(value):
            _THREAD.asks_nccl = True
        return found

    return names


class _Recorder:
    def __init__(self, path: Path, rank: int) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._lock = threading.Lock()
        self._num_units = 0
        self._num_jobs = 0
        # Names and ranks.
        self._groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._cpu_groups: weakref.WeakSet[Any] = weakref.WeakSet()
        self._units: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._ops: dict[tuple[Any, ...], int] = {}
        seed = os.environ.get(DELAY_SEED)
        self._delays = random.Random(f"{seed} {rank}") if seed else None

    def noting(self, original: Callable[..., Any], method: str, kind: str) -> Callable[..., Any]:
        """A method of ProcessGroup that is noted before it runs."""

        @functools.wraps(original)
        def issue(group: Any, *args: Any, **kwargs: Any) -> Any:
            known = None if hasattr(_THREAD, "is_unchecked") else self._known(group)
            if known is None:
                return original(group, *args, **kwargs)
            if self._delays is not None and self._delays.random() < 0.5:
                time.sleep(self._delays.random() * _MAX_DELAY_S)
            given = [*args, *kwargs.values()]
            values = *_described(method, kind, known[1], given), _fault(method, kind, given)
            with self._lock:
                batch = getattr(_THREAD, "batch", None)
                unit = self._next_unit() if batch is None else batch
                op = self._op((known[0], kind, batch is not None, *values), _site(sys._getframe(1)))
                self._write(issued(op, unit))
            work = original(group, *args, **kwargs)
            if work is not None:
                self._units[work] = unit
            elif batch is None:
                self._write(waited(unit))
            return work

        return issue

    def waiting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A method of Work that is noted before it runs."""

        @functools.wraps(original)
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            unit = self._units.get(work)
            if unit is not None:
                self._write(waited(unit))
            return original(work, *args, **kwargs)

        return wait

    def batching(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`batch_isend_irecv`, whose operations are one launch."""

        @functools.wraps(original)
        def batch(operations: Any) -> Any:
            if hasattr(_THREAD, "is_unchecked"):
                return original(operations)
            with self._lock:
                unit = self._next_unit()
            with _set("batch", unit):
                works = original(operations)
            # NCCL's operations have none of their own: there is one for the launch.
            for work in filter(None, works):
                self._units.setdefault(work, unit)
            return works

        return batch

    def initializing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`init_process_group`, after which torch begins to number groups again."""

        @functools.wraps(original)
        def initialize(*args: Any, **kwargs: Any) -> Any:
            self._num_jobs += 1
            group = original(*args, **kwargs)
            vars(_THREAD).pop("asks_nccl", None)
            return group

        return initialize

    def making(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """What makes a group with a backend, here after "nccl" was read as "gloo"."""
        signature = inspect.signature(original)

        @functools.wraps(original)
        def make(*args: Any, **kwargs: Any) -> Any:
            asks_nccl = vars(_THREAD).pop("asks_nccl", False)
            group = original(*args, **kwargs)
            backend = signature.bind(*args, **kwargs).arguments.get("backend")
            if backend == "gloo" and not asks_nccl and isinstance(group, ProcessGroup):
                self._cpu_groups.add(group)
            return group

        return make

    def _known(self, group: Any) -> tuple[str, list[int]] | None:
        known = self._groups.get(group)
        if known is None and group not in self._cpu_groups:
            ranks = dist.get_process_group_ranks(group)
            known = f"{self._num_jobs}:{group.group_name}", ranks
            self._groups[group] = known
            about = group.group_desc.removeprefix("undefined")
            self._write(line("group", known[0], ranks, about))
        return known

    def _next_unit(self) -> int:
        self._num_units += 1
        return self._num_units

    def _op(self, values: tuple[Any, ...], site: tuple[Any, ...]) -> int:
        """The number of an operation of these values and lines of code."""
        number = self._ops.get((values, site))
        if number is None:
            number = self._ops[values, site] = len(self._ops)
            places = zip(site[::2], site[1::2], strict=True)
            # A comprehension is a frame on the line of its function.
            lines = dict.fromkeys(f"{_short(path)}:{number}" for path, number in places)
            self._write(line("op", " < ".join(lines), *values))
        return number

    def _write(self, text: bytes) -> None:
        os.write(self._file, text)


def _site(frame: Any) -> tuple[Any, ...]:
    """Paths and numbers of the lines of code, outside of torch, that issue an operation."""
    places: list[Any] = []
    while frame is not None and len(places) < 2 * _SITE_FRAMES:
        path = frame.f_code.co_filename
        if _is_shown(path):
            places += path, frame.f_lineno
        frame = frame.f_back
    return tuple(places)


@functools.cache
def _is_shown(path: str) -> bool:
    return not path.startswith((*_SKIPPED, "<"))


def _short(path: str) -> str:
    return path.rpartition(_LIBRARIES)[2].removeprefix(f"{_ROOT}{os.sep}")


def _described(method: str, kind: str, ranks: list[int], args: list[Any]) -> tuple[Any, ...]:
    """Peer, dtype, sizes, received, reduction; see `notes.Op`."""
    if kind in (SEND, RECEIVE):
        peer = -1 if method == "recv_anysource" else ranks[args[1]]
        return peer, _dtype(args[0]), _numels(args[0]), (), ""
    if kind == ALL_TO_ALL:
        outputs, inputs = args[:2]
        if method == "alltoall":
            return -1, _dtype(inputs), _numels(inputs), _numels(outputs), ""
        own = _split(inputs, args[3], len(ranks)), _split(outputs, args[2], len(ranks))
        return -1, _dtype([inputs]), *own, ""
    options = next((arg for arg in args if type(arg).__name__.endswith("Options")), None)
    root = getattr(options, "rootRank", None)
    tensors = _collective_tensors(method, kind, args)
    sizes = _numels(tensors)
    return -1 if root is None else ranks[root], _dtype(tensors), sizes, (), _reduction(options)


def _collective_tensors(method: str, kind: str, args: list[Any]) -> list[Tensor]:
    """The tensors of which all ranks have as many elements."""
    if kind == "barrier":
        return []
    if method in ("allgather", "allgather_coalesced"):
        return _tensors(args[0])  # the parts of all ranks, which may differ in length
    return _tensors(args[kind in ("all_gather", "gather", "reduce_scatter")])


def _fault(method: str, kind: str, args: list[Any]) -> str:
    """Why NCCL refuses an operation by itself, after "NCCL has no"."""
    # A backward on a GPU has a thread of its own, for which the main thread waits.
    is_backward = torch._C._current_graph_task_id() != -1
    if threading.current_thread() is not threading.main_thread() and not is_backward:
        return f"order between threads (this is {threading.current_thread().name})"
    if method == "recv_anysource":
        return "receive from any rank"
    if kind in (SEND, RECEIVE):
        return f"tag {args[2]}" if args[2] else ""
    tensors = _tensors([arg for arg in args if isinstance(arg, Tensor | list)])
    return "" if all(tensor.is_contiguous() for tensor in tensors) else "tensors with gaps"


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in value if not isinstance(part, int) for tensor in _tensors(part)]


def _numels(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    return tuple(tensor.numel() for tensor in tensors)


def _dtype(tensors: Iterable[Tensor]) -> str:
    return "+".join(sorted({_dtype_name(tensor.dtype) for tensor in tensors}))


@functools.cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _split(tensor: Tensor, lengths: Sequence[int], parts: int) -> tuple[int, ...]:
    """Elements of a tensor's parts, which are `lengths` long in its first dimension, or equal."""
    if len(lengths) == 0:
        return (tensor.numel() // parts,) * parts
    width = tensor.numel() // max(tensor.shape[0], 1)
    return tuple(int(length) * width for length in lengths)


def _reduction(options: Any) -> str:
    return _reduction_name(options.reduceOp.op) if hasattr(options, "reduceOp") else ""


@functools.cache
def _reduction_name(reduction: Any) -> str:
    return str(reduction.name)
