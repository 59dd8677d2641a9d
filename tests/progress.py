"""Says now and then how far a run of pytest is: `-p tests.progress`, as tools/test.sh gives it.

    1234 of 6520 tests in 8:05, about 21:40 left; for 40 s in tests/slow/test_wheel.py::test_it

What is left is known from the last run, whose seconds of each file pytest's cache keeps.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import TextIO

import pytest

INTERVAL_S = 20.0
_CACHED = "megapack/seconds_of_files"


def clock(seconds: float) -> str:
    """Minutes and seconds: 125 gives 2:05."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Progress:
    """Counts tests and writes a line about them at every interval, also during a long test."""

    def __init__(self, stream: TextIO, last_seconds: dict[str, float], interval_s: float) -> None:
        """
        Args:
            stream: gets the lines.
            last_seconds: by file, what its tests took in the last run.
        """
        self.seconds: Counter[str] = Counter()
        self._last = last_seconds
        self._stream = stream
        self._interval_s = interval_s
        self._left: Counter[str] = Counter()
        self._sizes: Counter[str] = Counter()
        self._test = ""
        self._begun = self._began = time.monotonic()
        self._ended = threading.Event()

    def line(self) -> str:
        """How far the run is."""
        total, left = self._sizes.total(), self._left.total()
        passed_s = time.monotonic() - self._begun
        words = f"{total - left} of {total} tests in {clock(passed_s)}"
        if all(file in self._last for file in self._left):
            shares = {file: num / self._sizes[file] for file, num in self._left.items()}
            left_s = sum(share * self._last[file] for file, share in shares.items())
            words += f", about {clock(left_s)} left"
        return f"{words}; for {time.monotonic() - self._began:.0f} s in {self._test}"

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._sizes = Counter(item.nodeid.split("::")[0] for item in session.items)
        self._left = self._sizes.copy()
        threading.Thread(target=self._write_lines, daemon=True).start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._test, self._began = item.nodeid, time.monotonic()
        result = yield
        file = item.nodeid.split("::")[0]
        self.seconds[file] += time.monotonic() - self._began
        self._left -= Counter([file])
        return result

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._ended.set()
        session.config.cache.set(_CACHED, self._last | self.seconds)

    def _write_lines(self) -> None:
        while not self._ended.wait(self._interval_s):
            print(f"\n{self.line()}", file=self._stream, flush=True)


def pytest_configure(config: pytest.Config) -> None:
    last = config.cache.get(_CACHED, {})
    # pytest redirects stderr itself while a test runs.
    stream = os.fdopen(os.dup(2), "w")
    config.pluginmanager.register(Progress(stream, last, INTERVAL_S))
