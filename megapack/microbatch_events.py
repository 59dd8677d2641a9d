"""Tells who listens when the forward and the backward of each micro-batch begin and end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from megapack.forward import DeviceRow, ForwardStep

Kind = Literal["F", "B"]


class Listener:
    """Called on the thread that does the work; what it raises is raised there."""

    def begins(self, kind: Kind, chunk: int, microbatch: int) -> None:
        """A forward or backward begins on this rank's chunk."""

    def ends(self, kind: Kind, chunk: int, microbatch: int) -> None:
        """It ended: what it does on the device has been asked for."""

    def puts_out(self, chunk: int, microbatch: int, output: Tensor) -> None:
        """What a forward gave: hidden states, on the last chunk the loss."""


class HeardForward:
    """The same forward, with listeners; of one pass over a step's rows."""

    def __init__(
        self,
        forward: ForwardStep,
        chunks: Sequence[torch.nn.Module],
        listeners: Sequence[Listener],
    ) -> None:
        self._forward, self._chunks, self._listeners = forward, chunks, listeners
        self._num_forwards: Counter[int] = Counter()

    def __call__(
        self, rows: Iterator[DeviceRow], model: Any
    ) -> tuple[Tensor, Callable[[Tensor], Any] | None]:
        """See `forward.RowForward`."""
        chunk = next(i for i, own in enumerate(self._chunks) if own is model)
        # A chunk takes the rows in their order.
        microbatch = self._num_forwards[chunk]
        self._num_forwards[chunk] += 1
        self._begins("F", chunk, microbatch)
        output, loss_function = self._forward(rows, model)
        if loss_function is None:
            self._forward_ends(chunk, microbatch, output)
            return output, None

        # Megatron calls it right after the forward, whose work it is the end of.
        def heard(hidden: Tensor) -> Any:
            loss, *others = loss_function(hidden)
            self._forward_ends(chunk, microbatch, loss)
            return loss, *others

        return output, heard

    def _forward_ends(self, chunk: int, microbatch: int, output: Tensor) -> None:
        """The backward begins with the gradient of the forward's output."""
        for listener in self._listeners:
            listener.puts_out(chunk, microbatch, output)
        self._ends("F", chunk, microbatch)
        if not output.requires_grad:
            return

        def backward_begins(_: Tensor) -> None:
            self._begins("B", chunk, microbatch)
            # Called where the whole backward is done, recomputed forwards and all.
            torch.autograd.Variable._execution_engine.queue_callback(
                lambda: self._ends("B", chunk, microbatch)
            )

        output.register_hook(backward_begins)

    def _begins(self, kind: Kind, chunk: int, microbatch: int) -> None:
        for listener in self._listeners:
            listener.begins(kind, chunk, microbatch)

    def _ends(self, kind: Kind, chunk: int, microbatch: int) -> None:
        for listener in self._listeners:
            listener.ends(kind, chunk, microbatch)
