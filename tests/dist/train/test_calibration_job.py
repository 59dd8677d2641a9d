"""The main job fits its cost model while it trains, and a resumed run makes the same fits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megapack import CostModel
from megapack.plan.file import read_plan
from tests.dist.spawn import ROOT, run_job
from tests.dist.train.calibration_worker import TRUE
from tests.metric_names import documented

pytestmark = pytest.mark.dist

CONFIG = ROOT / "configs" / "gpt_tiny_dp2_pp2_vpp2_cpu.yaml"
# Four batches of two steps each. A fit after every second step, a checkpoint inside the second
# batch: it keeps one step of a window.
SETTINGS = [
    *("name=run", "data.num_generated=64", "data.prompts_per_batch=4", "plan.global_batch_size=8"),
    *("layout.dp=2", "layout.pp=2", "layout.vpp=1", "plan.max_tokens_per_gpu=512"),
    *("plan.calibrate=online", "plan.calibrate_interval=2", "plan.share_prefixes=off"),
    *("train.save_interval=3", "train.keep_checkpoints=null"),
]
SAVED_AT = 3


def run(folder: Path, *overrides: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The lines of metrics.jsonl and calibration.jsonl of the job in a folder."""
    args = ["train", str(CONFIG), *SETTINGS, *overrides]
    done = run_job(4, "tests.dist.train.calibration_worker", args, timeout_s=240, cwd=folder)
    assert done.returncode == 0, done.stdout[-6000:]
    files = (folder / "runs/run" / name for name in ("metrics.jsonl", "calibration.jsonl"))
    metrics, fits = ([json.loads(line) for line in file.read_text().splitlines()] for file in files)
    return metrics, fits


def test_a_run_learns_its_cost_model_and_a_resumed_one_does_so_bit_by_bit(tmp_path: Path) -> None:
    metrics, fits = run(tmp_path)
    assert documented("Calibration during the run") <= set(metrics[0])
    begin, *fits = fits
    assert (begin["step"], begin["num_fits"]) == (0, 0)
    assert [line["step"] for line in fits] == [2, 4, 6, 8]
    # The slow rank is named once, and the model is that of the others.
    messages = [message for line in fits for message in line["messages"]]
    assert sum("DP rank 1 of stage 0 took 1.50 times" in message for message in messages) == 1
    assert fits[-1]["num_left_out"] == 2
    assert fits[-1]["error_after"] < 0.01
    found = CostModel.from_json(json.dumps(fits[-1]["cost"]))
    for name in ("per_token", "per_token_sq", "backward_ratio"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.1), name
    assert found.stage_weights == pytest.approx(TRUE.stage_weights, rel=0.02)
    # The last batch was planned while the third one's steps ran, by the model at their beginning.
    plan_file = tmp_path / "runs/run/plan.json"
    assert json.loads(plan_file.read_text())["cost"] == fits[1]["cost"]
    assert read_plan(plan_file).num_samples == 16

    resumed = tmp_path / "resumed"
    checkpoint = tmp_path / f"runs/run/checkpoints/step-{SAVED_AT:08d}"
    shutil.copytree(checkpoint, resumed / checkpoint.relative_to(tmp_path))
    again, fits_again = run(resumed, f"train.resume={resumed / checkpoint.relative_to(tmp_path)}")
    assert [line for line in fits_again if line["step"] > SAVED_AT] == fits[1:]
    assert [line["step"] for line in again] == list(range(SAVED_AT + 1, 9))
    for one, other in zip(again, metrics[SAVED_AT:], strict=True):
        for key in ("plan_digest", "loss", "grad_norm"):
            assert one[key] == other[key], (one["step"], key)


@pytest.mark.weekly
def test_another_layout_begins_with_the_model_of_the_config(tmp_path: Path) -> None:
    run(tmp_path, "train.num_batches=2")
    _, fits = run(tmp_path, "layout.dp=4", "layout.pp=1", "train.resume=auto")
    assert [line["step"] for line in fits] == [0, 2, 4, 4, 6, 8]
    assert [line["num_fits"] for line in fits] == [0, 1, 2, 0, 1, 2]
    assert [line["num_left_out"] for line in fits if line["num_fits"]] == [2, 2, 2, 2]
    assert [len(line["cost"]["stage_weights"]) for line in fits[4:]] == [1, 1]
