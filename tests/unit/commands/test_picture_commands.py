"""The commands plot and report: the files that they write, and bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.run_folder import LENGTHS, make_plan, write_run

pytestmark = pytest.mark.unit

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a plan and a run."""
    monkeypatch.chdir(tmp_path)
    Path("plan.json").write_text(make_plan().to_json())
    Path("lengths.txt").write_text("".join(f"{length}\n" for length in LENGTHS))
    write_run(tmp_path / "run")
    return tmp_path


def test_plot_draws_the_given_step(call: Call) -> None:
    code, out, err = call("plot", "plan.json", "--step", "1", "-o", "a.svg")
    assert (code, out.splitlines()[0], err) == (0, "a.svg: step 1 of 2", "")
    assert "step 1 of plan" in Path("a.svg").read_text()


def test_report_of_a_plan_and_of_a_run(call: Call) -> None:
    code, out, err = call("report", "plan.json", "lengths.txt", "-o", "a.html")
    assert (code, err) == (0, "")
    assert f"plan {make_plan().digest()[:12]}" in out
    assert "sample lengths" in Path("a.html").read_text()
    code, out, _ = call("report", "plan.json")
    assert "give LENGTHS too" in out
    assert "sample lengths" not in Path("report.html").read_text()
    code, out, _ = call("report", "run")
    assert (code, out.splitlines()[0]) == (0, "report.html: run run")
    assert "scaled to the seconds that the run had measured" in out


BAD = [
    (("report",), ["PLAN|RUN"]),
    (("plot", "plan.json", "--step", "2"), ["step 2 of 2", "0 to 1"]),
    (("report", "plan.json", "-o", "plan.json"), ["plan.json is the input itself"]),
    (("report", "run", "-o", "run"), ["run is the input itself"]),
    (("report", "plan.json", "--cost", "none.yaml"), ["none.yaml"]),
    (("plot", "plan.json", "-o", "png"), ["unknown kind of picture"]),
    (("plot", "run", "-o", "a.png"), ["run: cannot be read"]),
    (("report", "run/plan.json", "run/metrics.jsonl"), ["metrics.jsonl", "no column"]),
    (("report", "plan.json", "lengths.txt", "-o", "lengths.txt"), ["is the input itself"]),
    (("report", "run", "lengths.txt"), ["run is a run", "leave lengths.txt out"]),
]


@pytest.mark.parametrize(("args", "words"), BAD, ids=[" ".join(args) for args, _ in BAD])
def test_bad_input_prints_one_line_and_writes_no_file(
    args: tuple[str, ...], words: list[str], call: Call, folder: Path
) -> None:
    before = sorted(path for path in folder.rglob("*"))
    code, out, err = call(*args)
    (line,) = err.splitlines()
    assert (code, out) == (2, "")
    assert line.startswith("megapack: ")
    assert all(word in line for word in words), line
    assert sorted(path for path in folder.rglob("*")) == before


def without_steps(plan: dict[str, Any]) -> None:
    plan["steps"] = []


def without_tokens(plan: dict[str, Any]) -> None:
    plan.update(max_tokens_per_gpu=None, micro_batch_size=3)
    plan["steps"][1]["ranks"][0][0][1:] = [0, 0, 0, 0]


def without_micro_batches(plan: dict[str, Any]) -> None:
    plan["steps"][0]["ranks"] = [[], []]


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (without_steps, "the plan has no steps"),
        (without_tokens, "step 1 has a row of 0 tokens"),
        (without_micro_batches, "M=0 with pp=2"),
    ],
)
def test_an_edited_plan_prints_one_line(
    edit: Callable[[dict[str, Any]], None], says: str, call: Call
) -> None:
    plan = json.loads(Path("plan.json").read_text())
    edit(plan)
    Path("plan.json").write_text(json.dumps(plan))
    code, _, err = call("report", "plan.json")
    assert (code, len(err.splitlines())) == (2, 1)
    assert says in err
