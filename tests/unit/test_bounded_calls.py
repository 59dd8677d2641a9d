"""A caller waits for its call no longer than the limit."""

from __future__ import annotations

import threading

import pytest

from megapack.bounded_calls import BoundedCalls

pytestmark = pytest.mark.unit


def _threads(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_results_and_errors_come_back() -> None:
    calls = BoundedCalls("calls", limit_s=30.0)
    assert [calls.run(lambda: 1), calls.run(lambda: 2)] == [1, 2]
    with pytest.raises(KeyError, match="a"):
        calls.run(lambda: {}["a"])
    calls.close()


def test_a_call_that_does_not_come_back_is_waited_for_once() -> None:
    calls, release = BoundedCalls("calls", limit_s=0.05), threading.Event()
    with pytest.raises(TimeoutError, match=r"no answer in 0\.05 s"):
        calls.run(release.wait)
    with pytest.raises(TimeoutError, match="an earlier call"):
        calls.run(lambda: pytest.fail("was not to be called"))
    release.set()
    # Once the late one is back, calls are answered as before.
    while True:
        try:
            assert calls.run(lambda: 3) == 3
            break
        except TimeoutError:
            continue
    calls.close()


def test_closing_ends_the_thread() -> None:
    calls = BoundedCalls("calls-to-close", limit_s=30.0)
    assert len(_threads("calls-to-close")) == 1
    calls.close()
    assert _threads("calls-to-close") == []
    with pytest.raises(RuntimeError, match="closed"):
        calls.run(lambda: 1)
