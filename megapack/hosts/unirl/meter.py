"""Seconds and memory of a host's training step, measured round the host's own methods."""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

_GIB = 2**30


class StepMeter:
    """Seconds of methods and memory watermarks, from its construction on.

    On CUDA, events are recorded and nothing is synchronized before `largest` reads them.

    Args:
        device: the model's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    @contextmanager
    def watching(self, owner: Any, method: str) -> Iterator[None]:
        """Time the calls of an object's method, by the method's name."""
        own = getattr(owner, method)

        @functools.wraps(own)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = self._now()
            result = own(*args, **kwargs)
            self._spans[method].append((start, self._now()))
            return result

        # In the instance's own attributes, which hide the method of its class.
        setattr(owner, method, timed)
        try:
            yield
        finally:
            delattr(owner, method)

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, method: str) -> float:
        """Seconds of all calls of a watched method; 0 without a call."""
        spans = self._spans[method]
        if self._device.type != "cuda":
            return float(sum(end - start for start, end in spans))
        torch.cuda.synchronize(self._device)
        return float(sum(start.elapsed_time(end) for start, end in spans)) / 1000

    def memory(self) -> dict[str, float]:
        """The most GiB that torch has allocated and reserved; empty without CUDA."""
        if self._device.type != "cuda":
            return {}
        return {
            "max_allocated_gib": torch.cuda.max_memory_allocated(self._device) / _GIB,
            "max_reserved_gib": torch.cuda.max_memory_reserved(self._device) / _GIB,
        }

    def largest(self, values: dict[str, float]) -> dict[str, float]:
        """The largest of each value on any rank; collective where torch.distributed runs.

        Args:
            values: with the same names on every rank.
        """
        if not dist.is_initialized():
            return values
        tensor = torch.tensor(list(values.values()), dtype=torch.float64, device=self._device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return dict(zip(values, tensor.tolist(), strict=True))
