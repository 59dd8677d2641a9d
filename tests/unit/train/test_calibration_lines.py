"""The line of calibration.jsonl for the cost model that a run begins with."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megapack import CostModel, Layout, Plan, build_dp_schedule
from megapack.config.sections import PlanConfig
from megapack.train.calibrator import Calibrator
from megapack.train.folder import RunFolder
from megapack.view.records import read_run

pytestmark = pytest.mark.unit

START = CostModel(per_token=1e-6, stage_weights=(0.9, 1.1))
LAYOUT = Layout(pp=2)
DEVICE = torch.device("cpu")


def calibrator(start: CostModel = START, **config: Any) -> Calibrator:
    settings = PlanConfig(max_tokens_per_gpu=64, **{"calibrate": "online", **config})
    adapter: Any = SimpleNamespace(dp_rank=0)
    return Calibrator(settings, adapter, LAYOUT, start, is_measured=False, device=DEVICE)


def resumed() -> Calibrator:
    """A calibrator that goes on where another one was saved."""
    saved = calibrator().state(None)
    assert saved is not None
    again = calibrator(CostModel(per_token=9e-6))
    again.load(saved)
    return again


def begin(path: Path, of: Calibrator, number: int, after: int | None = None) -> Path:
    folder = RunFolder(str(path), "run", continue_after=after)
    of.begin(folder, number)
    folder.close()
    return folder.path


def lines(path: Path) -> list[tuple[int, int, float]]:
    """Step, number of fits and per_token of each line."""
    texts = (path / "calibration.jsonl").read_text().splitlines()
    found = map(json.loads, texts)
    return [(line["step"], line["num_fits"], line["cost"]["per_token"]) for line in found]


def test_a_run_begins_with_its_model_and_the_page_reads_it(tmp_path: Path) -> None:
    path = begin(tmp_path, calibrator(), 0)
    assert lines(path) == [(0, 0, 1e-6)]
    plan: Plan = build_dp_schedule([8] * 4, layout=LAYOUT, max_tokens_per_gpu=64)
    folder = RunFolder(str(tmp_path), "run", continue_after=0)
    folder.write_plan(plan, START, [8] * 4)
    folder.close()
    records = read_run(path)
    assert [fit.cost for fit in records.fits] == [START]
    assert records.plan_cost == START
    assert records.plan == plan


def test_without_calibration_there_is_no_file(tmp_path: Path) -> None:
    path = begin(tmp_path, calibrator(calibrate="off"), 0)
    assert not (path / "calibration.jsonl").exists()


def test_a_run_that_goes_on_does_not_begin_again(tmp_path: Path) -> None:
    begin(tmp_path, calibrator(), 0)
    assert lines(begin(tmp_path, resumed(), 3, after=3)) == [(0, 0, 1e-6)]


def test_in_a_new_folder_it_notes_the_model_that_the_run_began_with(tmp_path: Path) -> None:
    assert lines(begin(tmp_path, resumed(), 3)) == [(3, 0, 1e-6)]


def test_another_layout_begins_anew(tmp_path: Path) -> None:
    begin(tmp_path, calibrator(), 0)
    other = calibrator(CostModel(per_token=5e-6))
    assert lines(begin(tmp_path, other, 4, after=4)) == [(0, 0, 1e-6), (4, 0, 5e-6)]
