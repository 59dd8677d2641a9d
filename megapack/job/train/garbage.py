"""Python's cyclic garbage collector, run at the same steps on all ranks.

Python starts it after a number of allocations, which every rank reaches at another time. The other
ranks then wait for that rank in their next collective: with 64 ranks, 64 pauses instead of one.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collecting_every(interval: int | None) -> Iterator[None]:
    """Within the block Python does not collect on its own, if there is an interval."""
    was_enabled = gc.isenabled()
    if interval is not None:
        gc.collect()
        gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def collect_after(step: int, interval: int | None) -> None:
    """Collect if the interval ends with this optimizer step; steps count from 1."""
    if interval is not None and step % interval == 0:
        gc.collect()
