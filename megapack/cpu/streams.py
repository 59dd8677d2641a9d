"""Streams and events of a device that runs everything in order."""

from __future__ import annotations

import time
from typing import Any


class NoStream:
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
        event = HostEvent() if event is None else event
        event.record()
        return event

    def synchronize(self) -> None:
        """Nothing to wait for."""


class HostEvent:
    """Stands in for a CUDA event: a time of the host's clock."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes what a CUDA event takes."""
        self._seconds = 0.0

    def record(self, stream: Any = None) -> None:
        """Note the time."""
        self._seconds = time.perf_counter()

    def elapsed_time(self, end_event: HostEvent) -> float:
        """Milliseconds from this event to the other one."""
        return (end_event._seconds - self._seconds) * 1000

    def query(self) -> bool:
        """It has happened."""
        return True

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""
