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
    """Runs calls one after another on a daemon thread, or on several.

    Args:
        name: of the threads.
        count: of threads, which take the calls in order.
    """

    def __init__(self, name: str, count: int = 1) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
        self._calls = queue.SimpleQueue()
        self._is_stopped = False
        self._threads = [
            threading.Thread(target=self._work, name=name, daemon=True) for _ in range(count)
        ]
        for thread in self._threads:
            thread.start()

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
        """Accept no more calls, and wait up to `limit_s` seconds per thread for the queued ones."""
        self._is_stopped = True
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join(limit_s)

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            call, future = item
            try:
                future.set_result(call())
            except BaseException as error:  # raised by the future's `result`
                future.set_exception(error)
            # These names would keep a step's rows in memory until the next call.
            del item, call, future
