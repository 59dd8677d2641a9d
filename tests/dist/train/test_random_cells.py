"""Random models, objectives, layouts and plans train as one process with one sample at a time."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tools.cells.draw import CELLS_PER_PROBLEM, draw_cell
from tools.random_cells import run_cell

pytestmark = pytest.mark.dist


def test_names_give_cells_and_problems_their_reference() -> None:
    cells = [draw_cell(5, number) for number in range(2 * CELLS_PER_PROBLEM)]
    assert cells == [draw_cell(5, number) for number in range(len(cells))]
    assert len({cell.problem for cell in cells}) == 2
    for cell in cells:
        first = next(other for other in cells if other.problem == cell.problem)
        assert cell.reference == first.reference
        assert cell.samples == first.samples


def test_cells_are_right(tmp_path: Path) -> None:
    found = run_cell(draw_cell(20, 1), tmp_path)
    assert found["verdict"] == "right", found


def test_what_differs_from_the_reference_is_seen(tmp_path: Path) -> None:
    cell = draw_cell(20, 0)
    changed = {"optim.weight_decay": 0.3, "optim.clip_grad": 1e-3}
    found = run_cell(dataclasses.replace(cell, keys=cell.keys | changed), tmp_path)
    assert found["verdict"] == "wrong"
    assert "weights" in found["text"]
