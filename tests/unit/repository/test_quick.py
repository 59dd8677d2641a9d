"""The list of `tools/test.sh --quick` names tests that exist, of every room."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

TESTS = Path(__file__).resolve().parents[2]
ROOT = TESTS.parent
QUICK = (TESTS / "quick.txt").read_text(encoding="utf-8").splitlines()


def test_every_room_has_a_quick_test() -> None:
    rooms = {path.name for path in (TESTS / "unit").iterdir() if any(path.rglob("test_*.py"))}
    assert rooms - {line.split("/")[2] for line in QUICK if line.startswith("tests/unit/")} == set()


@pytest.mark.parametrize("line", QUICK)
def test_quick_tests_exist(line: str) -> None:
    file, _, test = line.partition("::")
    names = {getattr(node, "name", "") for node in ast.parse((ROOT / file).read_text()).body}
    assert not test or test.partition("[")[0] in names
