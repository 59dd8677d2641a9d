"""Cyclic garbage is collected at the steps that the config says, and at no others."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from megapack.job.train.garbage import GarbageCollection

pytestmark = pytest.mark.unit


class Cycle:
    """Garbage that only the cyclic collector frees."""

    def __init__(self) -> None:
        self.itself = self


def is_alive() -> weakref.ref[Cycle]:
    return weakref.ref(Cycle())


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    gc.enable()
    yield
    assert gc.isenabled()


def test_garbage_is_collected_after_every_interval() -> None:
    garbage = GarbageCollection(interval=3)
    with garbage.manual():
        assert not gc.isenabled()
        cycle = is_alive()
        for step in (1, 2, 4, 5):
            garbage.after_step(step)
            assert cycle() is not None
        garbage.after_step(6)
        assert cycle() is None


def test_without_an_interval_python_decides() -> None:
    garbage = GarbageCollection(interval=None)
    with garbage.manual():
        assert gc.isenabled()
        gc.disable()
        cycle = is_alive()
        garbage.after_step(100)
        assert cycle() is not None
        gc.enable()
