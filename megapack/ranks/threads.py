"""Threads that run calls in order and never prevent the process from ending.

`ThreadPoolExecutor(max_workers=1)` would do the same, but Python joins its thread at exit: a call
that waits for a dead rank would keep the process alive.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def run_on_daemon(name: str, call: Callable[[], T]) -> Future[T]:
    """Run one call on a daemon thread of its own, which ends with it."""
    thread = DaemonThread(name)
    future = thread.submit(call)
    thread.stop(0.0)
    return future


class DaemonThread:
    """Runs calls one after another on a daemon thread.

    Args:
        name: the thread's name.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
        self._calls = queue.SimpleQueue()
        self._is_stopped = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Queue a call; the future gets its result or its error.

        Raises:
            RuntimeError: the thread was stopped.
        """
        if self._is_stopped:
            raise RuntimeError("the thread was stopped")
        future: Future[T] = Future()
        self._calls.put((call, future))
        return future

    def stop(self, limit_s: float) -> None:
        """Accept no more calls, and wait up to `limit_s` seconds for the queued ones."""
        self._is_stopped = True
        self._calls.put(None)
        self._thread.join(limit_s)

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            call, future = item
            try:
                future.set_result(call())
            except BaseException as error:  # raised by the future's `result`
                future.set_exception(error)
            # These names would keep a step's rows in memory until the next call.
            del item, call, future
