"""How far a run of the tests is, as `tests/progress.py` says it."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest

from tests import progress

pytestmark = pytest.mark.unit

IDS = ["a.py::one", "a.py::two", "b.py::one"]
HOUR_S = 3600.0


def begun(now: list[float], last: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run of three tests, of which the second runs for 40 s after the first took 65 s."""
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    found = progress.Progress(io.StringIO(), last, HOUR_S)
    items: list[Any] = [SimpleNamespace(nodeid=name) for name in IDS]
    found.pytest_collection_finish(SimpleNamespace(items=items))  # type: ignore[arg-type]
    for _ in found.pytest_runtest_protocol(items[0]):
        now[0] += 65
    running = found.pytest_runtest_protocol(items[1])
    next(running)
    now[0] += 40
    return found


def test_seconds_of_the_last_run_tell_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the tests of a.py and all of b.py: 60 and 31 s."""
    found = begun([0.0], {"a.py": 120.0, "b.py": 31.0}, monkeypatch)
    assert found.line() == "1 of 3 tests in 1:45, about 1:31 left; for 40 s in a.py::two"
    assert found.seconds == {"a.py": 65.0}


def test_nothing_is_guessed_for_files_that_have_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    found = begun([0.0], {"a.py": 120.0}, monkeypatch)
    assert found.line() == "1 of 3 tests in 1:45; for 40 s in a.py::two"
