"""Marks in a rank's work: CUDA events on a GPU, the host's clock elsewhere.

a mark before and after each forward, backward and computation of weight gradients -> Recorder
"""

from __future__ import annotations

import time
from typing import Any

import torch
from megatron.core import parallel_state

from megapack import cpu
from megapack.schedule.listeners import Kind, Listener

Span = tuple[Kind, int, int, Any, Any]
"""F, B or W, chunk, micro-batch, begin mark, end mark."""


def mark() -> Any:
    """The current point in the device's work: a CUDA event, or seconds of the host's clock."""
    if not cpu.uses_cuda():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begin: Any, end: Any) -> float:
    """Seconds from one mark to another; on a GPU both events must have completed."""
    if isinstance(begin, float):
        return float(end - begin)
    return float(begin.elapsed_time(end)) / 1e3


class Recorder(Listener):
    """Marks the operations of one step on this rank.

    Attributes:
        spans: the operations that have ended, in order.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._begun: dict[tuple[Kind, int, int], Any] = {}

    def on_begin(self, kind: Kind, chunk: int, microbatch: int) -> None:
        self._begun[kind, chunk, microbatch] = mark()

    def on_end(self, kind: Kind, chunk: int, microbatch: int) -> None:
        begin = self._begun.pop((kind, chunk, microbatch))
        self.spans.append((kind, chunk, microbatch, begin, mark()))


def reports_for_stage() -> bool:
    """Whether this rank's marks count.

    TP and CP ranks of one stage do the same work at the same time, so only the first reports.
    """
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    return bool(tp_rank == parallel_state.get_context_parallel_rank() == 0)
