"""The planner's table of shared prefixes, on small steps: no cell is slower with prefixes."""

from __future__ import annotations

from pathlib import Path

import pytest

from megapack import CostModel, Layout, Policy
from tools.bench_planner import write_between_marks
from tools.benching.planner_families import compare, generated_steps, shared_table

pytestmark = pytest.mark.unit

COST = CostModel(fixed=1e-4, per_token=1e-6, per_token_sq=1e-6 / 12288)


@pytest.mark.parametrize("layout", [Layout(dp=4), Layout(dp=2, pp=2, vpp=2)], ids=str)
@pytest.mark.parametrize("policy", [Policy(), Policy(search=0)], ids=["search", "search=0"])
def test_no_generated_step_is_slower_and_long_prompts_gain(layout: Layout, policy: Policy) -> None:
    speedups = {}
    for step in generated_steps(64):
        result = compare(step, layout, COST, policy)
        assert result.speedup >= 1
        assert result.tokens < 16
        speedups[step.name] = result.speedup
    assert speedups["agentic G=8"] > 1.5
    assert speedups["trees G=8"] > 1.1


def test_the_table_has_a_row_per_step_and_layout() -> None:
    layouts = {"dp2": Layout(dp=2), "pp2": Layout(pp=2)}
    costs = {name: {"7B": COST, "30B": COST} for name in layouts}
    lines = shared_table(generated_steps(16)[:2], layouts, costs)
    assert lines[0].startswith("| data | layout | shared prefixes, 7B ")
    rows = [line for line in lines if line.startswith("| math")]
    assert len(rows) == 4
    assert {row.count("|") for row in rows} == {lines[0].count("|")}
    assert lines[-2] == "- cells that are slower with prefixes: 0"


def test_tables_are_written_between_their_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before <a>\nold\n</a> after <b></b>", encoding="utf-8")
    write_between_marks(page, ("<b>", "</b>"), "one")
    write_between_marks(page, ("<a>", "</a>"), "two")
    assert page.read_text(encoding="utf-8") == "before <a>\ntwo\n</a> after <b>\none\n</b>"
    write_between_marks(page, ("<c>", "</c>"), "new")
    assert page.read_text(encoding="utf-8").endswith("</b><c>\nnew\n</c>")
