"""Work for the next batch on a thread: order, errors and the end."""

from __future__ import annotations

import threading

import pytest

from megapack.errors import DataError
from megapack.job.train.ahead import Ahead

# Seconds after which a test that hangs fails.
LIMIT_S = 30.0


def test_work_runs_while_the_caller_does_something_else() -> None:
    began = threading.Event()
    go_on = threading.Event()

    def work(key: str) -> str:
        began.set()
        assert go_on.wait(LIMIT_S)
        return f"plan of {key}"

    ahead = Ahead(work)
    ahead.begin("b")
    # The caller is here while the work has begun and has not ended.
    assert began.wait(LIMIT_S)
    go_on.set()
    assert ahead.take("b") == "plan of b"
    assert ahead.ahead_s > 0


def test_without_a_begin_the_caller_does_the_work() -> None:
    ahead: Ahead[str, int] = Ahead(lambda _: threading.get_ident())
    assert ahead.take("a") == threading.get_ident()
    assert ahead.ahead_s == 0
    ahead.begin("b")
    assert ahead.take("b") != threading.get_ident()


def test_an_error_is_raised_where_the_result_is_taken() -> None:
    def work(key: str) -> str:
        raise DataError(f"{key} has no tokens")

    ahead = Ahead(work)
    ahead.begin("sample 3")
    with pytest.raises(DataError, match="sample 3 has no tokens"):
        ahead.take("sample 3")
    # The next one is not disturbed.
    ahead.begin("sample 4")
    with pytest.raises(DataError, match="sample 4 has no tokens"):
        ahead.take("sample 4")


def test_closing_waits_for_work_that_has_begun() -> None:
    done: list[str] = []
    ahead = Ahead(done.append)
    ahead.begin("a")
    ahead.close()
    assert done == ["a"]
    ahead.close()
