"""What the next step needs is prepared and agreed on while this one runs.

A thread packs the next step's rows and sends one small all-reduce on a gloo group of its own, which
does not wait for the device; the step then finds both done.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

from megapack.consensus import agree
from megapack.watchdog import Watchdog

T = TypeVar("T")

_CPU = torch.device("cpu")
_POLL_S = 0.2
_END_S = 1.0


class Agreement(Generic[T]):
    """Work of all ranks that is under way; see `Agreements.start`."""

    def __init__(self, found: Future[T], watchdog: Watchdog | None) -> None:
        self._found, self._watchdog = found, watchdog

    def result(self, limit_s: float = math.inf) -> T:
        """What this rank's work gave, once all ranks have agreed.

        Args:
            limit_s: how long to wait for the others.

        Raises:
            ScheduleError: as `consensus.agree` does.
            RankError: another rank failed, or is gone, in the meantime.
            TimeoutError: the others did not come in this time.
        """
        end = time.monotonic() + limit_s
        while not wait([self._found], _POLL_S).done:
            if self._watchdog is not None:
                self._watchdog.raise_failure()
            if time.monotonic() > end:
                raise TimeoutError(f"the other ranks did not join in {limit_s:g} s")
        return self._found.result()


class Agreements:
    """Agreements one after another, in the order of `start`, which is the same on all ranks.

    Made on all ranks together: a collective.
    """

    def __init__(self, watchdog: Watchdog | None) -> None:
        self._watchdog = watchdog
        self._group = dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # A daemon: one that waits for a rank that is gone must not hold up the exit.
        self._thread = threading.Thread(target=self._work, name="megapack-agreements", daemon=True)
        self._thread.start()

    def start(self, work: Callable[[], T], same: Callable[[], Mapping[str, str]]) -> Agreement[T]:
        """Begin local work on the thread, and agree on it; a collective of all ranks.

        Args:
            work: see `consensus.agree`.
            same: what `consensus.agree` takes; called on the thread.
        """
        found: Future[T] = Future()

        def job() -> None:
            try:
                found.set_result(agree(work, device=_CPU, same=same(), group=self._group))
            except BaseException as error:  # raised by `Agreement.result`
                found.set_exception(error)

        self._jobs.put(job)
        return Agreement(found, self._watchdog)

    def stop(self) -> None:
        """End the thread once it has nothing left to do, unless it waits for other ranks."""
        self._jobs.put(None)
        has_failed = self._watchdog is not None and self._watchdog.failure is not None
        self._thread.join(0.0 if has_failed else _END_S)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            # Its rows would live on until the next job.
            del job
