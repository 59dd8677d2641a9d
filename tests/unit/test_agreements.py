"""Work on the next step's thread; here a job of one rank, or none at all."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from megapack import agreements as module
from megapack.agreements import Agreements
from megapack.board import Failure
from megapack.errors import RankError
from megapack.watchdog import Watchdog
from tests.job_in_process import job_of_one

pytestmark = pytest.mark.unit


@pytest.fixture
def watchdog() -> Iterator[Watchdog]:
    with job_of_one():
        made = Watchdog()
        yield made
        made.stop()


def test_work_runs_on_another_thread_in_order(watchdog: Watchdog) -> None:
    agreements, threads = Agreements(watchdog), []

    def work(number: int) -> int:
        threads.append(threading.current_thread())
        return number

    started = [agreements.start(lambda n=n: work(n), lambda: {"plan": "a"}) for n in range(20)]
    assert [one.result() for one in reversed(started)] == list(reversed(range(20)))
    assert len(set(threads)) == 1
    assert threads[0] is not threading.current_thread()
    agreements.stop()
    assert not threads[0].is_alive()


@pytest.mark.parametrize("error", [ValueError("bad"), TimeoutError("slow disk"), SystemExit(3)])
def test_errors_of_the_work_are_raised_by_its_result(
    watchdog: Watchdog, error: BaseException
) -> None:
    agreements = Agreements(watchdog)

    def work() -> None:
        raise error

    failed, fine = agreements.start(work, dict), agreements.start(lambda: 1, dict)
    with pytest.raises(type(error), match=str(error)):
        failed.result()
    assert fine.result() == 1
    agreements.stop()


def test_an_error_of_what_is_compared_is_raised_too(watchdog: Watchdog) -> None:
    agreements = Agreements(watchdog)

    def same() -> dict[str, str]:
        raise ValueError("no digest")

    with pytest.raises(ValueError, match="no digest"):
        agreements.start(lambda: 1, same).result()
    agreements.stop()


def test_work_that_takes_longer_than_a_poll_is_waited_for(
    watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_POLL_S", 0.001)
    agreements = Agreements(watchdog)
    for number in range(50):
        done = threading.Event()
        threading.Timer(0.002, done.set).start()
        found = agreements.start(lambda n=number, e=done: e.wait() and n, dict)
        assert found.result() == number
    agreements.stop()


def test_a_failure_of_another_rank_ends_the_wait(watchdog: Watchdog) -> None:
    agreements, release = Agreements(watchdog), threading.Event()
    waits = agreements.start(release.wait, dict)
    watchdog.tell(Failure(text="rank 1 is gone"))
    with pytest.raises(RankError, match="rank 1 is gone"):
        waits.result()
    release.set()
    assert waits.result()
    agreements.stop()
