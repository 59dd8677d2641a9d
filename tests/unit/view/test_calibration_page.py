"""The page of a run that fits its cost model, and the records that it reads."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from megapack import CostModel, MegapackError, build_dp_schedule
from megapack.plan.text import COST
from megapack.prefixes import SharedPrefixes
from megapack.view.page import page_html
from megapack.view.page_data import Page, run_page
from megapack.view.records import read_run
from tests.run_folder import LAYOUT, LENGTHS, make_plan, write_run

pytestmark = pytest.mark.unit

FIRST = CostModel(per_token=1e-3, fixed=1e-4)
FITTED = CostModel(per_token=1.5e-3, per_token_sq=2e-6, backward_ratio=1.5, weight_ratio=0.5)
LAST = replace(FITTED, stage_weights=(0.8, 0.9, 0.9, 1.4))
SLOW = "DP rank 1 of stage 0 took 1.50 times as long as the stage's other ranks"


def fit_line(step: int, number: int, cost: CostModel, **values: Any) -> dict[str, Any]:
    line = {
        "step": step,
        "num_fits": number,
        "cost": asdict(cost),
        "error_before": None,
        "error_after": None,
        "num_left_out": 0,
        "messages": [],
    }
    return line | values


LINES = [
    fit_line(0, 0, FIRST),
    fit_line(2, 1, FITTED, error_before=0.5, error_after=0.125, num_left_out=3, messages=[SLOW]),
    fit_line(4, 2, LAST, error_before=0.25, error_after=0.0625),
]


def write_calibrated(folder: Path, lines: list[dict[str, Any]] | None = None) -> Path:
    """A run of four steps with a fit after the second and the fourth."""
    write_run(folder)
    lines = LINES if lines is None else lines
    (folder / "calibration.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in metrics:
        line["step_predicted_at_start_s"] = None if line["step"] == 1 else 1.5
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in metrics))
    payload = json.loads(make_plan().to_json()) | {COST: asdict(FITTED)}
    (folder / "plan.json").write_text(json.dumps(payload))
    return folder


def page_of(folder: Path) -> Page:
    return run_page(read_run(folder), None)


def test_fits_and_the_plans_model_are_read(tmp_path: Path) -> None:
    records = read_run(write_calibrated(tmp_path / "run"))
    assert [(fit.step, fit.number, fit.cost) for fit in records.fits] == [
        (0, 0, FIRST),
        (2, 1, FITTED),
        (4, 2, LAST),
    ]
    assert records.fits[1].messages == (SLOW,)
    assert records.plan_cost == FITTED
    assert records.plan == make_plan()


def test_a_calibrated_runs_page(tmp_path: Path) -> None:
    page = page_of(write_calibrated(tmp_path / "run"))
    seconds, errors, loss = page.curves[:3]
    assert [(one["name"], one["y"]) for one in seconds["series"]] == [
        ("predicted", [None, 2.0, 2.0, 2.0]),
        ("measured", [3.0] * 4),
        ("by the first model", [None, 1.5, 1.5, 1.5]),
    ]
    assert (errors["title"], errors["unit"], errors["x"]) == (
        "error of the seconds of a row",
        "%",
        [2, 4],
    )
    assert [one["y"] for one in errors["series"]] == [[50.0, 25.0], [12.5, 6.25]]
    assert loss["title"] == "loss"
    facts = dict(page.facts)
    assert facts["fits of the cost model"] == "2, the last after step 4; 3 steps of a rank left out"
    assert facts["seconds of a row"] == "off by 50.0% before the first fit, by 6.2% after the last"
    # Steps 3 and 4: 2 and 1.5 predicted seconds for 3.
    assert (
        facts["predictions since the first fit"]
        == "off by 33.3% in the mean step; the first model by 50.0%"
    )
    assert facts["cost model: fixed, per chunk"] == "100 us -> 0"
    assert facts["cost model: per token"] == "1 ms -> 1.5 ms"
    assert facts["cost model: per squared token"] == "0 -> 2 us"
    assert facts["cost model: backward over forward"] == "2.00 -> 1.50"
    assert facts["cost model: weights of the chunks"] == "equal -> 0.80, 0.90, 0.90, 1.40"
    assert facts["cost model: weight gradients over forward"] == "1.00 -> 0.50"
    assert not {
        "cost model: per sample",
        "cost model: each further rank of a row, and fixed",
    } & set(facts)
    assert facts["last batch: planned by"] == "the fit after step 2"
    ratio = facts["last batch: first model's plan"]
    assert re.fullmatch(r"would take 1\.\d+ times as long as the last model's \(simulated\)", ratio)
    assert f"after step 2: {SLOW}" in page.notes
    assert "by the first model" in page_html(page)


def test_a_run_without_calibration_has_the_page_that_it_had(tmp_path: Path) -> None:
    folder = write_calibrated(tmp_path / "run")
    (folder / "calibration.jsonl").unlink()
    page = page_of(folder)
    write_run(tmp_path / "plain" / "run")
    plain = page_of(tmp_path / "plain" / "run")
    assert page == plain
    assert [len(curve["series"]) for curve in page.curves[:2]] == [2, 1]
    assert not any("model" in name for name, _ in page.facts)
    assert read_run(folder).plan_cost is None


def test_a_run_before_its_first_fit(tmp_path: Path) -> None:
    page = page_of(write_calibrated(tmp_path / "run", LINES[:1]))
    facts = dict(page.facts)
    assert facts["fits of the cost model"] == "0"
    assert facts["cost model: per token"] == "1 ms"
    assert "last batch: first model's plan" not in facts
    assert page.curves[1]["title"] == "loss"


def test_a_run_whose_first_model_is_not_known(tmp_path: Path) -> None:
    facts = dict(page_of(write_calibrated(tmp_path / "run", LINES[1:])).facts)
    assert facts["cost model: per token"] == "1.5 ms"
    assert "last batch: first model's plan" not in facts


def test_a_run_that_went_on_with_another_layout_counts_from_there(tmp_path: Path) -> None:
    before = replace(LAST, stage_weights=(0.9, 1.1))
    lines = [
        fit_line(0, 0, before),
        fit_line(1, 1, before, error_before=0.9, error_after=0.8, num_left_out=5),
        fit_line(1, 0, FIRST),
        fit_line(2, 1, FITTED, error_before=0.5, error_after=0.125),
    ]
    page = page_of(write_calibrated(tmp_path / "run", lines))
    facts = dict(page.facts)
    assert facts["fits of the cost model"] == "1, the last after step 2"
    assert facts["seconds of a row"].startswith("off by 50.0% before the first fit")
    assert "last batch: first model's plan" in facts
    assert page.curves[1]["x"] == [1, 2]


@pytest.mark.parametrize(
    ("break_it", "note"),
    [
        (lambda run: (run / "lengths.txt").unlink(), "no lengths.txt"),
        (
            lambda run: (run / "lengths.txt").write_text("7\n8\n"),
            "is not known: 2 lengths for a plan of 16 samples",
        ),
    ],
)
def test_what_cannot_be_compared_is_a_note(
    tmp_path: Path, break_it: Callable[[Path], object], note: str
) -> None:
    folder = write_calibrated(tmp_path / "run")
    break_it(folder)
    page = page_of(folder)
    assert "last batch: first model's plan" not in dict(page.facts)
    assert any(note in text for text in page.notes)


def test_prefixes_are_left_out_and_the_page_says_so(tmp_path: Path) -> None:
    records = read_run(write_calibrated(tmp_path / "run"))
    shared = build_dp_schedule(
        LENGTHS,
        layout=LAYOUT,
        max_tokens_per_gpu=1024,
        prefixes=SharedPrefixes(order=(0, 1, 2, 3), common=(0, 90, 90, 90)),
    )
    page = run_page(replace(records, plan=shared), None)
    assert "last batch: first model's plan" in dict(page.facts)
    assert any("without shared prefixes" in note for note in page.notes)


def test_many_messages_are_counted(tmp_path: Path) -> None:
    lines = [fit_line(step, step, LAST, messages=[f"text {step}"]) for step in range(1, 13)]
    notes = page_of(write_calibrated(tmp_path / "run", lines)).notes
    assert "4 earlier findings about slow ranks and stages are in calibration.jsonl" in notes
    shown = [note for note in notes if note.startswith("after step")]
    assert shown == [f"after step {step}: text {step}" for step in range(5, 13)]


def test_weights_of_many_chunks_are_a_range(tmp_path: Path) -> None:
    many = replace(LAST, stage_weights=(0.5, *[1.0] * 8, 1.5))
    facts = dict(page_of(write_calibrated(tmp_path / "run", [fit_line(0, 0, many)])).facts)
    assert facts["cost model: weights of the chunks"] == "0.50 to 1.50"


@pytest.mark.parametrize(
    "change",
    [
        lambda line: line.pop("step"),
        lambda line: line.pop("cost"),
        lambda line: line.pop("error_after"),
        lambda line: line.update(num_fits="1"),
        lambda line: line.update(num_left_out=None),
        lambda line: line.update(messages="text"),
        lambda line: line.update(messages=[1]),
        lambda line: line.update(cost={"per_token": -1.0}),
        lambda line: line.update(cost=None),
        lambda line: line["cost"].update(speed=1.0),
    ],
)
def test_the_error_of_a_broken_fit_names_its_line(
    tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    broken = json.loads(json.dumps(LINES[1]))
    change(broken)
    folder = write_calibrated(tmp_path / "run", [LINES[0], broken])
    with pytest.raises(MegapackError, match=r"calibration\.jsonl: line 2 is not a run's record"):
        read_run(folder)


def test_a_broken_model_of_the_plan_names_its_file(tmp_path: Path) -> None:
    folder = write_calibrated(tmp_path / "run")
    payload = json.loads(make_plan().to_json()) | {COST: {"per_token": -1.0}}
    (folder / "plan.json").write_text(json.dumps(payload))
    with pytest.raises(MegapackError, match=r"plan\.json: per_token=-1\.0"):
        read_run(folder)
