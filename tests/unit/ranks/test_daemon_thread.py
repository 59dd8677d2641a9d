"""Calls run in order on a daemon thread."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from megapack.ranks.threads import DaemonThread
from tests.job_in_process import until

pytestmark = pytest.mark.unit


def test_a_stopped_executor_runs_queued_calls_only() -> None:
    worker = DaemonThread("calls")
    release = threading.Event()
    worker.submit(release.wait)
    queued = worker.submit(lambda: 2)
    worker.stop(0.0)
    with pytest.raises(RuntimeError, match="stopped"):
        worker.submit(lambda: 3)
    release.set()
    assert queued.result() == 2


def test_an_idle_executor_holds_no_results() -> None:
    class Rows:
        pass

    worker = DaemonThread("calls")
    rows = worker.submit(Rows).result()
    reference = weakref.ref(rows)
    del rows

    def is_freed() -> bool:
        gc.collect()
        return reference() is None

    until(is_freed)
    worker.stop(30.0)


def test_several_threads_run_calls_at_the_same_time() -> None:
    threads = DaemonThread("test", 2)
    together = threading.Barrier(2, timeout=30)
    futures = [threads.submit(together.wait) for _ in range(2)]
    assert sorted(future.result(30) for future in futures) == [0, 1]
    threads.stop(30)
    with pytest.raises(RuntimeError, match="was stopped"):
        threads.submit(int)
