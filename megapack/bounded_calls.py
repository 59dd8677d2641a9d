"""Calls that may never come back, without waiting for them longer than a limit.

A store's client waits without end for a host that is frozen, whatever its timeout says.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

T = TypeVar("T")


class BoundedCalls:
    """Makes calls one after another, on a thread of its own.

    Args:
        name: of the thread.
        limit_s: how long a caller waits.
    """

    def __init__(self, name: str, *, limit_s: float) -> None:
        self._limit_s = limit_s
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
        self._calls = queue.SimpleQueue()
        self._late: Future[Any] | None = None
        self._is_closed = False
        # A daemon: a call that never comes back must not hold up the exit.
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def run(self, call: Callable[[], T]) -> T:
        """Make a call.

        Raises:
            TimeoutError: it takes longer than the limit, or an earlier one still does.
            Exception: what the call raises.
        """
        if self._is_closed:
            raise RuntimeError("closed")
        late = self._late
        if late is not None and not late.done():
            raise TimeoutError(f"an earlier call has not come back in {self._limit_s:g} s")
        found: Future[T] = Future()
        self._calls.put((call, found))
        if not wait([found], self._limit_s).done:
            self._late = found
            raise TimeoutError(f"no answer in {self._limit_s:g} s")
        return found.result()

    def close(self) -> None:
        """End the thread, unless a call holds it; later ones raise RuntimeError."""
        self._is_closed = True
        self._calls.put(None)
        self._thread.join(0.0 if self._late is not None else self._limit_s)

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            call, found = item
            try:
                found.set_result(call())
            except Exception as error:  # raised where the call was asked for
                found.set_exception(error)
