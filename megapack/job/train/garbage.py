"""Python's cyclic garbage collector, run at the same steps on all ranks.

Python starts it after a number of allocations, which every rank reaches at another time. The other
ranks then wait for that rank in their next collective: with 64 ranks, 64 pauses instead of one.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


class GarbageCollection:
    """Collects after every `interval` optimizer steps; None leaves it to Python."""

    def __init__(self, interval: int | None) -> None:
        self._interval = interval

    @contextlib.contextmanager
    def manual(self) -> Iterator[None]:
        """Within the block Python does not collect on its own, if there is an interval."""
        was_enabled = gc.isenabled()
        if self._interval is not None:
            gc.collect()
            gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()

    def after_step(self, step: int) -> None:
        """Collect if the interval ends with this optimizer step; steps count from 1."""
        if self._interval is not None and step % self._interval == 0:
            gc.collect()
