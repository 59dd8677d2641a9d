"""Each room of the package has a budget of code lines, so that what is added is made up for.

A change that needs more lines in a room takes as many away in another: the budgets' sum only falls.
A room that has shrunk gets a lower budget in the same change.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.code_lines import by_room, code_lines

pytestmark = pytest.mark.unit

BUDGETS = {
    "base": 658,
    "commands": 1576,
    "config": 367,
    "cost": 1941,
    "cpu": 1396,
    "doctor": 326,
    "hosts": 2531,
    "hosts.patching": 481,
    "job.checkpoint": 1003,
    "job.config": 2589,
    "job.data": 3083,
    "job.gpt": 1181,
    "job.hf": 1387,
    "job.train": 1498,
    "job.view": 510,
    "loss": 530,
    "model": 4365,
    "modules": 1058,
    "outlook": 798,
    "pipeline": 371,
    "plan": 1498,
    "planner": 3290,
    "prefixes": 514,
    "ranks": 895,
    "rows": 727,
    "samples": 436,
    "schedule": 3012,
}
TOTAL = 38_021
"""The sum of the budgets. It is never raised."""
IMAGES = {
    "commands": 47,
    "cost": 137,
    "hosts": 95,
    "job.config": 268,
    "job.data": 703,
    "job.gpt": 67,
    "job.hf": 31,
    "job.train": 39,
    "job.view": 14,
    "model": 289,
    "modules": 197,
    "outlook": 24,
    "pipeline": 67,
    "plan": 131,
    "planner": 65,
    "prefixes": 5,
    "ranks": 5,
    "rows": 54,
    "samples": 37,
    "schedule": 419,
}
"""What models with images have added to rooms."""
IMAGES_TOTAL = 2_694
"""The sum of these, which what else images need is taken from."""
# Lines that a room may be below its budget before that is lowered.
_SLACK = 20


def test_no_room_is_over_its_budget(repo_root: Path) -> None:
    rooms = by_room(repo_root / "megapack")
    assert rooms.keys() == BUDGETS.keys(), "a room is new or gone: give it a budget or take it back"
    most = {room: BUDGETS[room] + IMAGES.get(room, 0) for room in BUDGETS}
    over = {room: (lines, most[room]) for room, lines in rooms.items() if lines > most[room]}
    assert not over, f"code lines and budget: {over}; take lines away here, or budget elsewhere"


def test_budgets_fall_with_their_rooms(repo_root: Path) -> None:
    rooms = by_room(repo_root / "megapack")
    most = {room: BUDGETS[room] + IMAGES.get(room, 0) for room in BUDGETS}
    loose = {room: rooms[room] for room in most if rooms[room] + _SLACK < most[room]}
    assert not loose, f"lower these budgets, and TOTAL: {loose}"
    assert sum(BUDGETS.values()) == TOTAL
    assert sum(IMAGES.values()) <= IMAGES_TOTAL


def test_words_cost_nothing(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        '"""Two\nlines."""\n\nimport os  # code\n\n# a comment\nCONSTANT = """not\nwords"""\n'
        '"""Its docstring."""\n\n\ndef function():\n    """Words."""\n    return os\n'
    )
    # The import, two lines of the constant, the def and its return.
    assert code_lines(path) == 5
