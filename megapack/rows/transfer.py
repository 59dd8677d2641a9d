"""Copies between host and device for which the host does not wait one by one.

A row has about twenty tensors. On the host they are written into one pinned buffer, which one copy
moves without a wait of the host; the row's tensors on the device are views of the copy.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from megapack.layout import round_up

T = TypeVar("T")

# Views begin at multiples of this many bytes: the widest load of a CUDA thread is 16 bytes.
_ALIGNMENT_BYTES = 16


def moved(value: T, device: torch.device | str) -> T:
    """The same value with all of its CPU tensors on `device`.

    Args:
        value: a tensor, or dataclasses, mappings and tuples of values. Everything else stays as it
            is, and so does what a dataclass excludes with metadata {"moves": False}.

    >>> moved({"a": torch.tensor([True]), "b": (torch.tensor([1, 2]), "text")}, "cpu")
    {'a': tensor([True]), 'b': (tensor([1, 2]), 'text')}
    """
    tensors: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu":
            tensors[id(tensor)] = tensor
        return tensor

    _with_tensors(value, note)
    copies = dict(zip(tensors, _copied(list(tensors.values()), torch.device(device)), strict=True))
    return _with_tensors(value, lambda tensor: copies.get(id(tensor), tensor))


def host_like(tensor: Tensor) -> Tensor:
    """Memory of the host for a copy of a tensor, pinned if the tensor is on CUDA."""
    return torch.empty_like(tensor, device="cpu", requires_grad=False, pin_memory=tensor.is_cuda)


def host_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of the tensors in host memory, as `host_like`. The host waits once, for all of them.

    The device copies a tensor of 16 MiB into pinned memory in 0.6 ms, at 25 GB/s. A wait after each
    would leave it idle between them.
    """
    copies = [host_like(tensor).copy_(tensor.detach(), non_blocking=True) for tensor in tensors]
    if any(tensor.is_cuda for tensor in tensors):
        torch.cuda.synchronize()
    return copies


def _copied(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """The tensors on the device, as views of one buffer."""
    starts = [0]
    for tensor in tensors:
        starts.append(round_up(starts[-1] + tensor.nbytes, _ALIGNMENT_BYTES))
    # torch gives a pinned buffer to somebody else only after the copies from it have run.
    is_pinned = device.type == "cuda"
    buffer = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=is_pinned)
    for tensor, view in zip(tensors, _views(tensors, starts, buffer), strict=True):
        view.copy_(tensor)
    return _views(tensors, starts, buffer.to(device, non_blocking=True))


def _views(tensors: list[Tensor], starts: list[int], buffer: Tensor) -> list[Tensor]:
    """Parts of the buffer with the dtypes and shapes of the tensors.

    They share the buffer's memory and not its version: torch refuses the backward of a function if
    an input's version has changed, and views have one version together.
    """
    return [
        torch.empty(0, dtype=tensor.dtype, device=buffer.device).set_(
            buffer.untyped_storage(), start // tensor.element_size(), tensor.shape, ()
        )
        for tensor, start in zip(tensors, starts[:-1], strict=True)
    ]


def _with_tensors(value: T, change: Callable[[Tensor], Tensor]) -> T:
    """The value with each of its tensors replaced by `change` of it."""
    if isinstance(value, Tensor):
        return change(value)  # type: ignore[return-value]
    if isinstance(value, tuple):
        # Most values have no tensors: they stay the same objects.
        changed = tuple(_with_tensors(item, change) for item in value)
        return changed if any(map(_differ, changed, value)) else value  # type: ignore[return-value]
    if isinstance(value, Mapping):
        items = {k: _with_tensors(v, change) for k, v in value.items()}
        return items if any(map(_differ, items.values(), value.values())) else value  # type: ignore[return-value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = _moving_names(type(value))
        own = [getattr(value, name) for name in names]
        attributes = [_with_tensors(item, change) for item in own]
        pairs = zip(names, attributes, own, strict=True)
        changes = {name: new for name, new, old in pairs if new is not old}
        return dataclasses.replace(value, **changes) if changes else value
    return value


@functools.cache
def _moving_names(kind: Any) -> list[str]:
    """The fields of a dataclass that are not excluded."""
    return [f.name for f in dataclasses.fields(kind) if f.metadata.get("moves", True)]


def _differ(one: object, other: object) -> bool:
    return one is not other
