"""The way of a step, as the adapter's docstring shows it, is that of the code."""

from __future__ import annotations

import inspect
import re

import pytest

from megapack.schedule import adapter as schedule
from megapack.schedule.faults import FiniteFlags
from megapack.schedule.forward import ForwardStep, LastStage

pytestmark = pytest.mark.unit

KNOWN = {
    **vars(schedule),
    **vars(schedule.ScheduleAdapter),
    **{one.__name__: one for one in (FiniteFlags, ForwardStep, LastStage)},
}


def way() -> list[str]:
    text = inspect.getdoc(schedule.ScheduleAdapter) or ""
    found = re.search(r"call and back:\n\n(.*?)\n\n", text, re.DOTALL)
    assert found is not None
    return found[1].splitlines()


def test_it_is_at_most_ten_lines() -> None:
    assert len(way()) <= 10


def test_its_names_are_in_the_code() -> None:
    names = re.findall(r"`([\w.]+)`", "\n".join(way()))
    assert len(names) > 8
    for name in names:
        first, *parts = name.split(".")
        found = KNOWN[first]
        for part in parts:
            found = getattr(found, part)
