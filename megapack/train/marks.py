"""Marks in a rank's work: CUDA events on a GPU, the host's clock elsewhere."""

from __future__ import annotations

import time
from typing import Any

import torch

from megapack import cpu


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
