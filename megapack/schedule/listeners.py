"""Who is told of each operation that this rank runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from megapack.ranks.place import Phase, Place

Kind = Literal["F", "B", "W", "E", "T"]
"""Forward, backward, or the weight gradients that a backward has left; images encoded ahead, or the
tower's backward, both of micro-batch -1."""


class Listener:
    """Called at each operation, on the thread that runs it, where it may raise.

    Chunks and micro-batches are numbered on this rank.
    """

    def on_begin(self, kind: Kind, chunk: int, microbatch: int) -> None:
        """An operation begins."""

    def on_end(self, kind: Kind, chunk: int, microbatch: int) -> None:
        """An operation has ended: all its work is queued on the device."""

    def on_output(self, chunk: int, microbatch: int, output: Tensor) -> None:
        """The result of a forward: hidden states, or on the last chunk the loss."""


class Listeners:
    """The listeners of one pass over a step's micro-batches."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self._listeners = listeners

    def begin(self, kind: Kind, chunk: int, microbatch: int) -> None:
        """An operation begins."""
        for listener in self._listeners:
            listener.on_begin(kind, chunk, microbatch)

    def end_forward(self, chunk: int, microbatch: int, output: Tensor) -> None:
        """A forward has ended; its backward will be noticed by its output's gradient."""
        for listener in self._listeners:
            listener.on_output(chunk, microbatch, output)
        self.end("F", chunk, microbatch)
        if not output.requires_grad:
            return

        # The backward begins with the gradient of the forward's output.
        def begin_backward(_: Tensor) -> None:
            self.begin("B", chunk, microbatch)
            # The engine calls this at the end of the whole backward, including recomputed forwards.
            torch.autograd.Variable._execution_engine.queue_callback(
                lambda: self.end("B", chunk, microbatch)
            )

        output.register_hook(begin_backward)

    def end(self, kind: Kind, chunk: int, microbatch: int) -> None:
        """An operation has ended."""
        for listener in self._listeners:
            listener.on_end(kind, chunk, microbatch)


_PHASES: dict[Kind, Phase] = {"F": "forward", "B": "backward", "W": "weight gradients"}


class PlaceKeeper(Listener):
    """Records the operation that began last in this rank's place."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def on_begin(self, kind: Kind, chunk: int, microbatch: int) -> None:
        if kind in _PHASES:
            self._place.enter(_PHASES[kind], chunk, microbatch)
