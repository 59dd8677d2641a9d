"""Today's decisions, pinned. Write them anew with MEGAPACK_WRITE_GOLDEN=1 and read the change."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

from megapack import Plan, build_dp_schedule, check_plan

pytestmark = pytest.mark.golden

FOLDER = Path(__file__).parent


def _cases() -> dict[str, tuple[list[int], dict[str, Any]]]:
    spec = importlib.util.spec_from_file_location("golden_cases", FOLDER / "cases.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.CASES  # type: ignore[no-any-return]


CASES = _cases()


@pytest.mark.parametrize("name", CASES)
def test_plan_is_the_pinned_one(name: str) -> None:
    lengths, arguments = CASES[name]
    plan = build_dp_schedule(lengths, **arguments)
    check_plan(plan, lengths)
    file = FOLDER / f"{name}.plan"
    if os.environ.get("MEGAPACK_WRITE_GOLDEN"):
        file.write_text(str(plan), encoding="utf-8")
    pinned = Plan.from_text(file.read_text(encoding="utf-8"))
    assert str(plan) == str(pinned)
    assert plan.digest() == pinned.digest()


def test_there_are_no_other_golden_plans() -> None:
    assert {file.stem for file in FOLDER.glob("*.plan")} == set(CASES)
