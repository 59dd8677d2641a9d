"""The judge of the planner's search, on small steps of generated lengths."""

from __future__ import annotations

from pathlib import Path

import pytest

from megapack import Policy
from tools.planner_judge import FIXED, Table, compare, measure

pytestmark = pytest.mark.unit


def test_cells_are_compared_by_table_and_with_fixed_rows() -> None:
    table = Table(Policy(search=0), ("dp8",), (16, 24))
    cells = measure(table, Path("no traces"))
    # Two kinds of lengths and two models.
    assert len(cells) == 8
    assert all(ratio > 1 and ms > 0 for ratio, ms in cells.values())
    slower = {name: (1.01 * ratio, 2 * ms) for name, (ratio, ms) in cells.items()}
    before = {FIXED: cells, "dynamic CP": cells}
    lines = list(compare(before, {FIXED: cells, "dynamic CP": slower}))
    assert lines[0].startswith("fixed: +0.00 %, worst +0.00 % (dp8, 16 samples, ")
    assert lines[4].startswith("dynamic CP: +1.00 %, worst +1.00 %")
    assert lines[5].startswith("  dp8, 16 samples: +1.00 %, ")
    assert lines[5].endswith(", x 2.00")
    assert lines[7].startswith("  slower than fixed rows: 8 of 8 [")
