"""The planner's tables, on small steps, and the files that they are written to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megapack import CostModel, Layout, Policy
from tools import bench_planner
from tools.benching import planner_common, planner_speed
from tools.benching.planner_families import compare, generated_steps
from tools.benching.planner_parts import PARTS
from tools.pages import measured

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


def test_a_file_says_what_was_measured_and_by_which_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measured, "MEASURED", tmp_path)
    for name, part in PARTS.items():
        path = bench_planner.write(name, " --peer verl", ["| a |", "|---|", "| 1 |"])
        head = measured.Head.read(path)
        assert path == tmp_path / f"planner_{name}.md"
        assert head.title == part.title
        assert " ".join(head.what.split()) == " ".join(part.what.split())
        assert head.command == f"python tools/bench_planner.py --only-{name} --peer verl"
        assert path.read_text(encoding="utf-8").endswith("\n\n| a |\n|---|\n| 1 |\n")
    assert capsys.readouterr().out.count("| a |") == len(PARTS)


def test_only_the_chosen_files_are_written_and_folders_are_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "MEASURED", tmp_path)
    monkeypatch.setattr(bench_planner, "common", lambda *_: ["| a |"])
    command = ["bench_planner.py", "--only-common", "--megatron", "/somewhere/else"]
    monkeypatch.setattr("sys.argv", command)
    bench_planner.main()
    (path,) = tmp_path.iterdir()
    assert path.name == "planner_common.md"
    command_line = "python tools/bench_planner.py --only-common --megatron FOLDER"
    assert measured.Head.read(path).command == command_line


def test_the_table_of_strategies_has_a_mean_of_each_layout() -> None:
    lines = bench_planner.quality({"few": (np.arange(100, 2100, 50), 4096)}, {})
    means = [line.split(" | ")[1] for line in lines if line.startswith("| geometric mean")]
    assert means == [*bench_planner.LAYOUTS, ""]
    assert lines[0].count("|") == lines[-7].count("|")


def test_others_are_as_fast_with_the_best_of_five_budgets_or_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner_common, "JOBS", {4: (24, {"dp2 pp2": Layout(dp=2, pp=2)})})
    lines = planner_common.common_table(tmp_path / "none", {})
    given, tuned = (line.split(" | ")[3:] for line in lines if line.startswith("| 4 |"))
    hosts = ["Megatron-LM", "slime", "NeMo-RL", "verl"]
    heads = [line.strip("| ").split(" | ")[3:] for line in lines if line.startswith("| GPUs")]
    assert heads == [[*hosts, *planner_common.OURS], [*hosts, "megapack"]]
    # On two stages smaller rows make the bubble smaller.
    assert all(float(own) < float(other) for own, other in zip(tuned, given[:4], strict=False))
    assert given[4] == tuned[4].strip("| ")


def test_cells_far_from_the_bound_are_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_planner, "LAYOUTS", {"dp2": Layout(dp=2)})
    monkeypatch.setattr(bench_planner, "WANTED_DISTANCE", 0.5)
    lines = bench_planner.bound({"few": (np.arange(100, 1100, 50), 4096)})
    again = lines[lines.index("With `search: 200000`:") + 4 :]
    assert [line.split(" | ")[2] for line in again] == list(bench_planner.MODELS)


def test_large_layouts_gain_from_rows_over_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    small = planner_speed.Target(64, Layout(dp=4, pp=2), planner_speed.DYNAMIC, 1.0)
    monkeypatch.setattr(planner_speed, "TARGETS", (planner_speed.TARGETS[0], small))
    header, _, row = planner_speed.gain_table()
    fixed, dynamic, ratio = map(float, row.strip(" |").split(" | ")[2:])
    assert header.count("|") == row.count("|")
    assert ratio >= 1
    assert dynamic <= fixed
