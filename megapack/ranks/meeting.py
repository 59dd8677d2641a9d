"""Ranks that share a row ask before each collective of its layers whether all of them take part.

A rank that runs out of memory inside a layer cannot join the collectives that the others wait in.
In a pass that may be tried again they ask first, by one number: the rank that is out answers once,
and the others leave the layer with `OthersOutOfMemory`. The host waits for the answer, so passes
that are not tried again do not ask.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Ask = Callable[[Any], None]

# Of the pass that runs in this process. Not of a thread: on GPUs, backwards run on another one.
_asks: list[Ask] = []


class OthersOutOfMemory(RuntimeError):
    """Another rank that shares the row is out of memory."""


@contextlib.contextmanager
def asking(ask: Ask) -> Iterator[None]:
    """Within the block, ranks ask before they meet.

    Args:
        ask: called with the group; raises OthersOutOfMemory.
    """
    _asks.append(ask)
    try:
        yield
    finally:
        _asks.remove(ask)


def meet(group: Any, room: Callable[[], Tensor] | None = None) -> None:
    """Call before a collective of ranks that share a row.

    Args:
        room: makes a tensor as large as what the collective will allocate. It is freed at once, so
            that a rank runs out of memory before it has answered.
    """
    if not _asks or group.size() == 1:
        return
    if room is not None:
        room()
    _asks[-1](group)


def meeting_backward(gathered: Tensor, group: Any) -> Tensor:
    """The result of a gather, before whose reduction in the backward ranks ask."""
    if not _asks or group.size() == 1:
        return gathered
    return _Meeting.apply(gathered, group)  # type: ignore[no-any-return, no-untyped-call]


class _Meeting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gathered: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return gathered.view_as(gathered)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        meet(ctx.group, lambda: grad.new_empty((len(grad) // ctx.group.size(), *grad.shape[1:])))
        return grad, None
