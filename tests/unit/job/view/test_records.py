"""A run's folder read back; errors name the broken line."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megapack import CostModel, DataError, MegapackError
from megapack.job.view.records import number_or_none, read_run
from tests.run_folder import LENGTHS, make_plan, write_run

pytestmark = pytest.mark.unit


def test_all_files_of_a_run_are_read(tmp_path: Path) -> None:
    cost = CostModel(per_token=1e-3, stage_weights=(1.0, 1.0, 1.0, 1.0))
    records = read_run(write_run(tmp_path / "one", cost=cost))
    assert records.name == "one"
    assert records.plan == make_plan()
    assert records.lengths is not None
    assert records.lengths.tolist() == LENGTHS
    assert [step.number for step in records.traced] == [2, 3]
    assert {step.cost for step in records.traced} == {cost}
    assert records.traced[1].plan.steps == make_plan().steps[1:]
    assert [records.seconds(step) for step in (1, 2, 9)] == [3.0, 2.0, None]


def test_the_cost_model_of_the_plan_is_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    assert read_run(folder).cost is None
    plan = json.loads((folder / "plan.json").read_text())
    cost = CostModel(per_token=1e-3)
    (folder / "plan.json").write_text(json.dumps(plan | {"cost": json.loads(cost.to_json())}))
    assert read_run(folder).cost == cost
    (folder / "plan.json").write_text(json.dumps(plan | {"cost": {"per_token": -1}}))
    with pytest.raises(DataError, match=r"plan\.json: .*per_token"):
        read_run(folder)


def test_a_run_without_traces_and_lengths(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "trace.jsonl").unlink()
    (folder / "lengths.txt").unlink()
    records = read_run(folder)
    assert (records.traced, records.lengths) == ((), None)


def test_half_a_line_at_the_end_is_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    for name in ("metrics.jsonl", "trace.jsonl"):
        path = folder / name
        path.write_text(path.read_text()[:-9])
    records = read_run(folder)
    assert [line["step"] for line in records.metrics] == [1, 2, 3]
    assert [step.number for step in records.traced] == [2]


def set_event(index: int, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda line: line["events"][0].__setitem__(index, value)


@pytest.mark.parametrize(
    "change",
    [
        set_event(0, 2),
        set_event(1, -1),
        set_event(2, "0"),
        set_event(3, 99),
        set_event(4, "X"),
        set_event(6, -1.0),
        set_event(5, None),
        set_event(6, float("inf")),
        set_event(6, float("nan")),
        lambda line: line["plan"]["steps"][0]["ranks"][0][0].__setitem__(1, 0),
        lambda line: line["events"][0].pop(),
        lambda line: line.pop("plan"),
        lambda line: line["plan"].pop("layout"),
        lambda line: line["plan"]["steps"].clear(),
        lambda line: line.update(step="2"),
        lambda line: line.update(cost={"per_token": -1.0, "stage_weights": None}),
    ],
)
def test_the_error_of_a_broken_trace_names_its_line(
    tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    path = write_run(tmp_path / "run") / "trace.jsonl"
    first, second = map(json.loads, path.read_text().splitlines())
    change(second)
    path.write_text(json.dumps(first) + "\n" + json.dumps(second) + "\n")
    with pytest.raises(MegapackError, match=r"trace\.jsonl: line 2 is not a run's record"):
        read_run(path.parent)


@pytest.mark.parametrize("name", ["metrics.jsonl", "plan.json"])
def test_a_folder_without_a_run_is_refused(tmp_path: Path, name: str) -> None:
    folder = write_run(tmp_path / "run")
    (folder / name).unlink()
    with pytest.raises(MegapackError, match=rf"{name}: cannot be read"):
        read_run(folder)


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (1, 1.0),
        (0.5, 0.5),
        (-2.0, -2.0),
        *((value, None) for value in ("nan", None, True, [1], {}, 10**400, math.inf, math.nan)),
    ],
)
def test_only_finite_numbers_are_numbers(value: Any, number: float | None) -> None:
    assert number_or_none(value) == number
