"""A ledger of what a GPU run would do with its devices, kept while real CPU tensors run.

    cpu.enable((9, 0))
    with rehearsed_gpu() as ledger:
        launch.start("cuda")
        with ledger.phase("step"):
            adapter.step(...)
    ledger.of("wait", "step")

Each storage has a note of its place (`places`). A dispatch mode carries the notes from the inputs
of an operation to its results, in forwards and in backwards, and `pretended_cuda` gives `device`,
`.cuda()`, factories and streams the answers of a GPU. The ledger has three kinds of entries:

- "wait": the host needs a result of the device, so it stops until all earlier work is done. Reads
  of values, shapes that depend on values, copies that are not asynchronous, `synchronize`.
- "mixed": an operation or a kernel gets tensors of both places, which CUDA refuses.
- "collective": a group that a GPU run makes over NCCL gets tensors of the host, or a group of the
  host gets tensors of the GPU.

Operations of threads other than the one that entered the ledger are not seen, apart from `.to`,
`.cpu` and `.cuda`. A kernel of the CPU may be composed of other operations than the GPU's, so a
wait inside a CUDA kernel's own code is not in the ledger.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests.rehearsal.places import Place, place_of, put

Kind = Literal["wait", "mixed", "collective"]

# Operations whose result's value or shape the host reads.
_READS = {
    *("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::bincount"),
    *("aten::_unique2", "aten::unique_dim", "aten::unique_consecutive"),
    *("aten::unique_dim_consecutive", "aten::allclose"),
}
_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
# Take a number as a tensor without dimensions on the host, in addition to pointwise operations.
_TAKE_NUMBERS = {"aten::fill", "aten::fill_", "aten::masked_fill", "aten::masked_fill_"}
_COPIES = {"aten::copy_", "aten::_foreach_copy_"}

# Not lines of a GPU run: this ledger, and what stands in for CUDA.
_STAND_INS = re.compile(r"tests/rehearsal/(device_ledger|places|pretended_cuda)\.py|megapack/cpu/")
_SOURCE = re.compile(r".*/((megapack|megatron|transformer_engine|tests)/.*\.py)$")


class Frame(NamedTuple):
    """A line of megapack, Megatron, Transformer Engine or the tests."""

    file: str
    """From the package on: "megapack/job/train/passes.py"."""
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.function})"


class Entry(NamedTuple):
    """Something that a GPU run would do; the ledger counts equal ones."""

    kind: Kind
    phase: str
    what: str
    """The operation, and for tensors at a wrong place their shapes."""
    frame: Frame
    """The innermost line."""
    caller: Frame | None
    """Where that is Megatron's or Transformer Engine's, the innermost line of megapack; else
    None."""

    @property
    def place(self) -> str:
        """What does it, without a line: "megapack/schedule/faults.py:_origins_on_all: item"."""
        return f"{self.frame.file}:{self.frame.function}: {self.what}"

    def __str__(self) -> str:
        caller = "" if self.caller is None else f", called by {self.caller}"
        return f"{self.what} at {self.frame}{caller}"


class DeviceLedger(TorchDispatchMode):
    """Counts what a GPU run would do, see the module. Entered, it follows this thread's tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: Counter[Entry] = Counter()
        self.host_groups: set[str] = set()
        """Names of the process groups that were asked for over gloo alone."""
        self._phase = ""
        self._is_quiet = False

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Within the block, entries carry this phase's name."""
        outer, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = outer

    def of(self, kind: Kind, phase: str | None = None) -> Counter[Entry]:
        """The entries of a kind, of one phase or of all."""
        return Counter(
            {
                entry: count
                for entry, count in self.entries.items()
                if entry.kind == kind and phase in (None, entry.phase)
            }
        )

    def note(self, kind: Kind, what: str) -> None:
        """Count an entry at the caller's line."""
        if self._is_quiet:
            return
        frame, caller = _lines()
        self.entries[Entry(kind, self._phase, what, frame, caller)] += 1

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Within the block runs what a GPU run does not have; nothing of it counts."""
        outer, self._is_quiet = self._is_quiet, True
        try:
            yield
        finally:
            self._is_quiet = outer

    def kernel(
        self, name: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a stand-in for a compiled kernel, see `megapack.cpu.te.calls.run`, as one operation.

        All of its tensors must be on the GPU, and so are its results; what the stand-in does
        inside does not count.
        """
        tensors = list(_tensors((args, kwargs)))
        host = [t for t in tensors if t.numel() and not self._adopted(t)]
        if host:
            self.note("mixed", f"{name} gets host tensors {_shapes(host)}")
        with self.quiet(), _disable_current_modes():
            result = run(*args, **kwargs)
        for tensor in _tensors(result):
            if not any(tensor is given for given in tensors):
                put(tensor, Place.GPU)
        return result

    @contextlib.contextmanager
    def moving_objects(self, name: str, group: Any) -> Iterator[None]:
        """Within the block runs a collective of Python objects.

        NCCL sends them through the GPU: it copies their bytes there and back and waits for both.
        """
        if self._names_host(group):
            yield
            return
        self.note("wait", name)
        with self.quiet():
            yield

    def copy(self, target: Place, source: Place, *, non_blocking: bool, pins: bool = False) -> None:
        """Count a copy between places, if it waits.

        A copy is asynchronous if it is asked to be and the host's side is pinned.

        Args:
            pins: the copy makes its own pinned memory, as `.to("cpu", non_blocking=True)` does.
        """
        if (target is Place.GPU) == (source is Place.GPU):
            return
        host = source if target is Place.GPU else target
        if not (non_blocking and (pins or host is Place.PINNED)):
            self.note("wait", "copy to the GPU" if target is Place.GPU else "copy to the host")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.name().partition(".")[0]
        tensors = list(_tensors((args, kwargs)))
        if name.startswith("c10d::"):
            self._check_collective(name, args, tensors)
            return func(*args, **kwargs)
        uses_gpu = any(place_of(t) is Place.GPU for t in tensors)
        if uses_gpu:
            self._check(func, name, args, kwargs, tensors)
        result = func(*args, **kwargs)
        self._note_results(result, tensors, uses_gpu=uses_gpu)
        return result

    def _note_results(self, result: Any, tensors: list[Tensor], *, uses_gpu: bool) -> None:
        # After the operation: `set_` gives a tensor other memory.
        given = {id(t.untyped_storage()) for t in tensors}
        is_free = all(place_of(t) is Place.EITHER for t in tensors)
        for tensor in _tensors(result):
            if id(tensor.untyped_storage()) in given:
                continue
            if uses_gpu:
                put(tensor, Place.GPU)
            elif is_free:
                put(tensor, Place.EITHER)

    def _check(
        self, func: Any, name: str, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> None:
        """Count what an operation with a tensor on the GPU does."""
        if name in _INDEXING:
            self._check_index(name, args)
        host = [t for t in tensors if not self._adopted(t)]
        short = name.removeprefix("aten::")
        if name in _COPIES:
            self._check_copies(func, args, kwargs)
            return
        if host and _refuses(func, name, args, kwargs, host):
            self.note("mixed", f"{short} gets {_shapes(tensors)}")
        if (
            name in _READS
            or (name == "aten::equal" and not _is_same(*tensors))
            or (name == "aten::repeat_interleave" and kwargs.get("output_size") is None)
        ):
            self.note("wait", "item" if short == "_local_scalar_dense" else short)

    def _check_copies(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        non_blocking = bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
        pairs = zip(*args[:2], strict=True) if isinstance(args[0], list) else [args[:2]]
        for target, source in pairs:
            if source.numel():
                self.copy(place_of(target), place_of(source), non_blocking=non_blocking)

    def _check_index(self, name: str, args: Any) -> None:
        indices = [t for t in args[1] if t is not None]
        if any(place_of(t) in (Place.HOST, Place.PINNED) for t in indices):
            self.note("wait", "index on the host")
            return
        masks = [t for t in indices if t.dtype in (torch.bool, torch.uint8)]
        # A number of the host fills a mask without knowing how many places that has. So do the
        # zeros of its gradient, which are of either place.
        fills = name != "aten::index" and args[2].dim() == 0 and place_of(args[2]) is not Place.GPU
        if masks and not (fills and len(masks) == len(indices)):
            self.note("wait", "index by a mask")

    def _check_collective(self, name: str, args: Any, tensors: list[Tensor]) -> None:
        is_host = self._names_host(next(filter(None, map(_process_group, args)), None))
        short = name.removeprefix("c10d::").rstrip("_")
        if short == "barrier":
            if not is_host:
                self.note("wait", short)
            return
        wrong = [t for t in tensors if t.numel() and self._adopted(t, not is_host) is is_host]
        if wrong:
            place = "GPU" if is_host else "host"
            self.note("collective", f"{short} gets {place} tensors {_shapes(wrong)}")

    def _names_host(self, group: Any) -> bool:
        if group is None:
            group = dist.group.WORLD
        return getattr(group, "group_name", None) in self.host_groups

    def _adopted(self, tensor: Tensor, by_gpu: bool = True) -> bool:
        """Whether a tensor is on the GPU; one of either place is from now on."""
        place = place_of(tensor)
        if place is Place.EITHER and by_gpu:
            put(tensor, Place.GPU)
            return True
        return place is Place.GPU


def _refuses(func: Any, name: str, args: Any, kwargs: dict[str, Any], host: list[Tensor]) -> bool:
    """Whether CUDA raises because these tensors of an operation are on the host."""
    schema = func._schema.arguments
    written = [
        value
        for argument, value in zip(schema, args, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if any(t is h for t in _tensors([*written, kwargs.get("out")]) for h in host):
        return True
    if name in _INDEXING:
        # Indices of the host are copied, and a number fills.
        indices = list(_tensors(args[1]))
        rest = [h for h in host if not any(h is t for t in indices)]
        return any(h is args[0] or h.dim() > 0 for h in rest)
    takes_numbers = (
        name in _TAKE_NUMBERS
        or name.startswith("aten::_foreach")
        or torch.Tag.pointwise in func.tags
    )
    return not takes_numbers or any(h.dim() > 0 for h in host)


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same elements of the same memory, which `equal` does not read."""
    return (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
    )


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in arguments or results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _shapes(tensors: Iterable[Tensor]) -> str:
    return ", ".join(f"{place_of(t).value} {list(t.shape)}" for t in tensors)


def _process_group(value: Any) -> Any:
    """The process group that an argument of a collective is; None for another argument."""
    if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
        return dist.ProcessGroup.unbox(value)
    return None


@functools.cache
def _source(path: str) -> str | None:
    found = _SOURCE.match(path)
    return None if found is None or _STAND_INS.match(found[1]) else found[1]


def _lines() -> tuple[Frame, Frame | None]:
    """The innermost line of a package that is looked at, and the innermost of megapack."""
    first = None
    frame = sys._getframe(2)
    while frame is not None:
        file = _source(frame.f_code.co_filename)
        if file is not None:
            found = Frame(file, frame.f_lineno, frame.f_code.co_name)
            first = first or found
            if file.startswith("megapack/"):
                return first, None if first is found else found
        frame = frame.f_back  # type: ignore[assignment]
    return first or Frame("elsewhere", 0, ""), None
