"""The main job with communication that overlaps: the same numbers, checkpoints and reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.dist.spawn import ROOT, run_job

pytestmark = pytest.mark.dist

CONFIG = ROOT / "configs" / "gpt_tiny_dp2_pp2_vpp2_cpu.yaml"
DP2 = ["layout.dp=2", "layout.pp=1", "layout.vpp=1", "optim.distributed_optimizer=true"]
# Two batches of two steps: the reference's weights are swapped in while a gather is pending.
TINY = [
    *("data.num_generated=32", "data.prompts_per_batch=4", "plan.global_batch_size=8"),
    "train.entropy_interval=1",
]
OVERLAP = ["optim.overlap_grad_reduce=true", "optim.overlap_param_gather=true"]
BUCKETS = ["optim.bucket_size=5000", "train.manual_gc_interval=3"]
RECOMPUTE = ["model.recompute=selective", "model.recompute_modules=[mlp]"]
SAVES = ["train.save_interval=3"]


def train(tmp_path: Path, name: str, *overrides: str) -> tuple[str, list[dict[str, Any]]]:
    """settings.txt and metrics of a run on two ranks."""
    args = ["train", str(CONFIG), f"name={name}", *DP2, *TINY, *SAVES, *overrides]
    done = run_job(2, "megapack", args, timeout_s=400, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    text = (tmp_path / "runs" / name / "metrics.jsonl").read_text()
    settings = (tmp_path / "runs" / name / "settings.txt").read_text()
    return settings, [json.loads(line) for line in text.splitlines()]


def check(lines: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [line["plan_digest"] for line in lines] == [line["plan_digest"] for line in expected]
    for line, other in zip(lines, expected, strict=True):
        for key in ("loss", "grad_norm", "kl_ref_nats", "entropy_nats"):
            assert line[key] == pytest.approx(other[key], rel=1e-5, abs=1e-7), (key, line["step"])


def test_overlap_and_recomputed_modules_change_no_number(tmp_path: Path) -> None:
    settings, expected = train(tmp_path, "plain")
    assert "settings on: none; off: bias_activation_fusion" in settings
    assert len(expected) == 4
    assert expected[-1]["kl_ref_nats"] > 0
    settings, lines = train(tmp_path, "overlap", *OVERLAP, *BUCKETS, *RECOMPUTE)
    assert "settings on: overlap_grad_reduce, overlap_param_gather; off" in settings
    check(lines, expected)
    # A checkpoint written while a gather was pending holds the weights after its step.
    resume = f"train.resume={tmp_path}/runs/overlap/checkpoints/step-00000003"
    _, resumed = train(tmp_path, "resumed", resume, *OVERLAP, *BUCKETS)
    check(resumed, expected[3:])
