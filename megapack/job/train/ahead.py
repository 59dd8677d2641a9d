"""`Ahead`: local work for the next batch, on a thread, while the steps of the current one run."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

from megapack.ranks.threads import run_on_daemon

K = TypeVar("K")
T = TypeVar("T")

# Seconds that `close` waits for work that has begun: planning 2,048 samples takes 0.02 s, and
# reading their tokens from a slow disk a few seconds. Chosen by hand.
_CLOSE_S = 5.0


class Ahead(Generic[K, T]):
    """Runs work for one key ahead of its use.

        ahead.begin(2)          # on a thread
        ...                     # the steps of batch 1
        batch = ahead.take(2)   # waits if the thread has not finished; raises what the work raised

    The work must be local: the thread joins no collective. Its order of calls is that of the keys,
    one at a time, so that work may keep state of its own.

    Args:
        work: makes the result of a key.

    Attributes:
        ahead_s: seconds that the thread worked for the result that was taken last; 0 if `take` did
            the work itself.
    """

    def __init__(self, work: Callable[[K], T]) -> None:
        self.ahead_s = 0.0
        self._work = work
        self._begun: tuple[K, Future[tuple[T, float]]] | None = None

    def begin(self, key: K) -> None:
        """Start the work of a key; the result of the one before must have been taken."""
        assert self._begun is None
        # A daemon: a thread that waits for a lost file system must not keep the process.
        self._begun = (key, run_on_daemon("megapack-ahead", lambda: self._timed(key)))

    def take(self, key: K) -> T:
        """The result of a key, or the error of its work. Without `begin` the work is done here."""
        begun = self._begun
        self._begun = None
        self.ahead_s = 0.0
        if begun is None:
            return self._work(key)
        expected, result = begun
        assert expected is key
        made, self.ahead_s = result.result()
        return made

    def close(self) -> None:
        """Wait a few seconds for work that has begun, and forget its result."""
        begun = self._begun
        self._begun = None
        if begun is not None:
            wait([begun[1]], _CLOSE_S)

    def _timed(self, key: K) -> tuple[T, float]:
        began = time.perf_counter()
        made = self._work(key)
        return made, time.perf_counter() - began
