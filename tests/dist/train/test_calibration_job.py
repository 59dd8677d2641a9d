"""The main job fits its cost model while it trains, and a resumed run fits anew."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from megapack import CostModel, Layout
from megapack.config.cost_file import read_cost
from megapack.plan.file import read_plan
from tests.dist.spawn import ROOT, run_job
from tests.dist.train.calibration_worker import TRUE
from tests.metric_names import documented

pytestmark = pytest.mark.dist

CONFIG = ROOT / "configs" / "gpt_tiny_dp2_pp2_vpp2_cpu.yaml"
# Four batches of two steps each, and a fit after every second step. The plan of the third batch is
# the first by a fitted model; a checkpoint is saved inside it.
SETTINGS = [
    *("name=run", "data.num_generated=64", "data.prompts_per_batch=4", "plan.global_batch_size=8"),
    *("layout.dp=2", "layout.pp=2", "layout.vpp=1", "plan.max_tokens_per_gpu=512"),
    *("plan.calibrate=online", "plan.calibrate_interval=2", "plan.share_prefixes=off"),
    *("train.save_interval=5", "train.keep_checkpoints=null"),
]
SAVED_AT = 5


def run(folder: Path, *overrides: str) -> tuple[list[dict[str, Any]], str]:
    """The lines of metrics.jsonl of the job in a folder, and what it says."""
    args = ["train", str(CONFIG), *SETTINGS, *overrides]
    done = run_job(4, "tests.dist.train.calibration_worker", args, timeout_s=240, cwd=folder)
    assert done.returncode == 0, done.stdout[-6000:]
    text = (folder / "runs/run/metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()], done.stdout


def fitted(folder: Path, layout: Layout) -> CostModel:
    return read_cost(folder / "runs/run/cost.yaml", layout)


def plan_cost(folder: Path) -> CostModel:
    """The model that the last batch was planned with."""
    payload = json.loads((folder / "runs/run/plan.json").read_text(encoding="utf-8"))
    return CostModel.from_json(json.dumps(payload["cost"]))


def assert_true(found: CostModel) -> None:
    for name in ("per_token", "per_token_sq", "backward_ratio"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.1), name


def test_a_run_learns_its_cost_model_and_a_resumed_one_begins_anew(tmp_path: Path) -> None:
    layout = Layout(dp=2, pp=2)
    metrics, said = run(tmp_path)
    assert documented("Calibration during the run") <= set(metrics[0])
    # The slow rank is named once, and the model is that of the others. Its ratio is to a first fit
    # that has its own seconds too.
    (ratio,) = re.findall(r"DP rank 1 of stage 0 took ([\d.]+) times", said)
    assert 1.4 < float(ratio) < 1.6
    assert_true(fitted(tmp_path, layout))
    assert fitted(tmp_path, layout).stage_weights == pytest.approx(TRUE.stage_weights, rel=0.02)
    # The last batch was planned while the third one's steps ran, by the model at their beginning.
    assert_true(plan_cost(tmp_path))
    assert plan_cost(tmp_path) != fitted(tmp_path, layout)
    assert read_plan(tmp_path / "runs/run/plan.json").num_samples == 16

    resumed = tmp_path / "resumed"
    checkpoint = tmp_path / f"runs/run/checkpoints/step-{SAVED_AT:08d}"
    copied = resumed / checkpoint.relative_to(tmp_path)
    shutil.copytree(checkpoint, copied)
    again, said = run(resumed, f"train.resume={copied}")
    assert f"resumed after step {SAVED_AT}" in said
    assert [line["step"] for line in again] == list(range(SAVED_AT + 1, 9))
    # The plan of the batch is one by the first model again, so sums are rounded in another order.
    for one, other in zip(again, metrics[SAVED_AT:], strict=True):
        for key in ("loss", "grad_norm"):
            assert one[key] == pytest.approx(other[key], rel=1e-4, abs=1e-6), (one["step"], key)
    assert plan_cost(resumed).per_token > 1.2 * TRUE.per_token
    assert_true(fitted(resumed, layout))


@pytest.mark.weekly
def test_another_layout_begins_anew(tmp_path: Path) -> None:
    run(tmp_path, "train.num_batches=2", "train.save_interval=4")
    metrics, said = run(tmp_path, "layout.dp=4", "layout.pp=1", "train.resume=auto")
    assert "resumed after step 4" in said
    assert [line["step"] for line in metrics] == list(range(1, 9))
    assert fitted(tmp_path, Layout(dp=4)).weights_for(Layout(dp=4)) == (1.0,)
