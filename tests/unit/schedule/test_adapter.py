"""The path of a step that the adapter's docstring lists is the path in the code."""

from __future__ import annotations

import inspect
import re

import pytest

from megapack.rows.packed import PlacedRow
from megapack.schedule import adapter
from megapack.schedule.faults import FiniteFlags
from megapack.schedule.forward import ForwardStep, LastStage

pytestmark = pytest.mark.unit

KNOWN = {
    **vars(adapter),
    **vars(adapter.ScheduleAdapter),
    **{one.__name__: one for one in (FiniteFlags, ForwardStep, LastStage, PlacedRow)},
}


def path_of_a_step() -> list[str]:
    text = inspect.getdoc(adapter.ScheduleAdapter) or ""
    match = re.search(r"calls of a `step`, in order:\n\n(.*?)\n\n", text, re.DOTALL)
    assert match is not None
    return match[1].splitlines()


def test_the_path_has_at_most_ten_lines() -> None:
    assert len(path_of_a_step()) <= 10


def test_the_names_of_the_path_are_in_the_code() -> None:
    names = re.findall(r"`([\w.]+)`", "\n".join(path_of_a_step()))
    assert len(names) > 8
    for name in names:
        first, *parts = name.split(".")
        value = KNOWN[first]
        for part in parts:
            value = getattr(value, part)
