"""Cyclic garbage is collected at the steps that the config says, and at no others."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from megapack.job.train.garbage import collect_after, collecting_every

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
    with collecting_every(3):
        assert not gc.isenabled()
        cycle = is_alive()
        for step in (1, 2, 4, 5):
            collect_after(step, 3)
            assert cycle() is not None
        collect_after(6, 3)
        assert cycle() is None


def test_without_an_interval_python_decides() -> None:
    with collecting_every(None):
        assert gc.isenabled()
        gc.disable()
        cycle = is_alive()
        collect_after(100, None)
        assert cycle() is not None
        gc.enable()
