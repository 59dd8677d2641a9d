"""The examples in docstrings are right, of every module that has some."""

from __future__ import annotations

import doctest
import importlib

import pytest

from tests.child import ROOT

pytestmark = pytest.mark.unit

# Hosts' modules import their frameworks.
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "megapack").rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


def test_modules_with_examples_are_found() -> None:
    assert {"megapack.rows.packed", "megapack.layout"} <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_examples_are_right(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0
