"""tools/calibrate.py measures a small model; the main job plans and predicts with its cost file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megapack import CostModel, Layout
from megapack.config.cost_file import read_cost
from tests.dist.spawn import ROOT, run_job

pytestmark = [pytest.mark.weekly, pytest.mark.dist]

CONFIG = str(ROOT / "configs" / "gpt_tiny_dp2_pp2_vpp2_cpu.yaml")
JOB = ["layout.dp=1", "layout.vpp=1", "plan.max_tokens_per_gpu=256"]


def test_a_measured_cost_model_predicts_step_times(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("prompt,response\n" + "20,60\n30,90\n1,9\n" * 8 + "9,99999\n")
    tool = [sys.executable, str(ROOT / "tools" / "calibrate.py"), CONFIG, *JOB]
    done = subprocess.run(
        [*tool, "--out", "cost.yaml", "--rounds", "5", "--trace", str(trace)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    fits = ("fitted to 12 rows of up to 256 tokens: forward mean", "of 24 samples: forward mean")
    for text in (*fits, "stage weights", "wrote cost.yaml"):
        assert text in done.stdout
    # Only the total is checked: on a busy machine the fit may set any coefficient to 0.
    layout = Layout(pp=2)
    cost = read_cost(tmp_path / "cost.yaml", layout)
    row = {"row_tokens": 256, "tokens_sq": 128 * 256, "num_samples": 2}
    assert 1e-5 < cost.forward_seconds(layout, **row) < 10

    args = ["train", CONFIG, "name=run", *JOB, "plan.cost_model=cost.yaml"]
    args += ["data.num_generated=16", "plan.global_batch_size=8"]
    trained = run_job(2, "megapack", args, timeout_s=200, cwd=tmp_path)
    assert trained.returncode == 0, trained.stdout
    lines = (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()
    for line in map(json.loads, lines):
        # Predictions in seconds. In tokens, 256 per row, the ratio would be far outside.
        assert 0.02 < line["step_predicted_s"] / line["step_measured_s"] < 50


def test_two_ranks_measure_what_sharing_rows_costs(tmp_path: Path) -> None:
    job = [*JOB, "model.num_layers=2", "plan.max_tokens_per_gpu=128", "plan.backward=split"]
    args = [CONFIG, *job, "--out", "cost.yaml", "--rounds", "1"]
    done = run_job(2, "tools.calibrate", args, timeout_s=200, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "over 2 data-parallel ranks: forward mean" in done.stdout
    assert "weight gradients are" in done.stdout
    overhead = read_cost(tmp_path / "cost.yaml", Layout(pp=2)).cp_overhead
    # On a busy machine the fit may see nothing but fixed seconds.
    is_default = overhead == CostModel.cp_overhead
    text = (
        "not measured: their seconds" if is_default else f"cp_overhead {overhead:.3f} and cp_fixed "
    )
    assert text in done.stdout
