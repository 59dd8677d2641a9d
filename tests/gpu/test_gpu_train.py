"""`megapack train` on a GPU: saved while it trains, resumed, timed, and out of memory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megapack import simulate
from megapack.config.cost_file import read_cost
from megapack.job.view.records import read_run
from tests.gpu.rehearsed import REHEARSED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "gpt_tiny_dp2_pp2_vpp2_cpu.yaml"
SETTINGS = ["name=run", "device=cuda", "layout.dp=1", "layout.pp=1", "layout.vpp=1"]
SETTINGS += ["model.dtype=bf16", "model.hidden_size=256", "data.num_generated=32"]
SETTINGS += ["data.prompts_per_batch=4", "plan.global_batch_size=8"]
# A model whose activations take 2.7 GiB per 8,192 tokens, and samples that fill rows of 32,768.
LARGE = ["model.num_layers=8", "model.hidden_size=1024", "model.num_attention_heads=16"]
LARGE += ["model.num_query_groups=8", "plan.max_tokens_per_gpu=32768", "data.num_generated=256"]
LARGE += ["data.prompts_per_batch=128", "plan.global_batch_size=512", "objective.kl_coef=0"]
MEMORY_GIB = 10
SAVING = ["train.save_interval=1", "train.async_save=true", "plan.max_tokens_per_gpu=512"]
TIMEOUT_S = 600 if REHEARSED else 60


def run(
    folder: Path, *overrides: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A run in a folder, which has ended."""
    folder.mkdir(exist_ok=True)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "megapack", "train", str(CONFIG), *SETTINGS, *overrides]
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def train(folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """The metrics of a run in a folder, by step."""
    done = run(folder, *overrides)
    assert done.returncode == 0, done.stdout[-6000:]
    lines = (folder / "runs/run/metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of four steps that are saved, timed and fitted while it trains."""
    folder = tmp_path_factory.mktemp("train") / "whole"
    timing = ["train.trace_steps=3", "plan.calibrate=online", "plan.calibrate_interval=2"]
    lines = train(folder, *SAVING, *timing)
    assert len(lines) == 4
    return folder / "runs/run"


def test_a_run_saves_while_it_trains_and_resumes(whole: Path, tmp_path: Path) -> None:
    train(tmp_path / "cut", *SAVING, "train.num_batches=1")
    resumed = train(tmp_path / "cut", *SAVING, "train.resume=auto")
    expected_lines = read_run(whole).metrics
    assert [line["step"] for line in resumed] == [line["step"] for line in expected_lines]
    for line, expected in zip(resumed, expected_lines, strict=True):
        # The backward of attention adds up in any order.
        assert line["loss"] == pytest.approx(expected["loss"], rel=0.02, abs=1e-3)
        assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.05)


def test_events_time_forwards_and_backwards(whole: Path) -> None:
    run = read_run(whole)
    fitted = read_cost(whole / "cost.yaml", run.plan.layout)
    # One fit after step 2, and one after step 4.
    first, second, third = (traced.cost for traced in run.traced)
    assert first != second == third != fitted
    assert [traced.number for traced in run.traced] == [2, 3, 4]
    assert sum(len(traced.events) for traced in run.traced) > 2 * 3
    for traced in run.traced:
        (step,) = traced.plan.steps
        times = [
            time
            for event in sorted(traced.events, key=lambda event: event.start)
            for time in (event.start, event.end)
        ]
        assert len(times) == 2 * 2 * len(step.ranks[0])
        assert 0 < times[0] < times[-1]
        assert times == sorted(times), "two forwards or backwards overlap"
        busy_s = sum(event.end - event.start for event in traced.events)
        step_s = run.metrics[traced.number - 1]["step_measured_s"]
        # The rest is packing, launching and the reduction of gradients.
        assert step_s / 10 < busy_s < 1.05 * step_s
        # Sizes, not precision: rows are small, and the first step warms up.
        fitted_s = simulate(step, layout=traced.plan.layout, cost=fitted).makespan
        assert busy_s / 5 < fitted_s < 5 * busy_s


@pytest.mark.skipif(REHEARSED, reason="a CPU does not run out of memory")
def test_a_step_that_runs_out_of_memory_ends_with_what_to_set(tmp_path: Path) -> None:
    share = MEMORY_GIB * 2**30 / torch.cuda.get_device_properties(0).total_memory
    env = {"PYTORCH_CUDA_ALLOC_CONF": f"per_process_memory_fraction:{share:.4f}"}
    done = run(tmp_path, *LARGE, env=env)
    assert done.returncode == 1, done.stdout[-6000:]
    (error,) = [line for line in done.stdout.splitlines() if line.startswith("megapack: CUDA ")]
    found = re.fullmatch(
        r"megapack: CUDA out of memory\. .*; the step's rows have up to (\d+) tokens on this GPU"
        r"(, micro-batch \d+ \(samples .*\) has \d+)?; set a lower plan.max_tokens_per_gpu"
        r".*recompute.*",
        error,
    )
    assert found is not None, error
    assert 8192 < int(found[1]) <= 32768
    assert "Traceback" not in done.stdout
    done = run(tmp_path / "small", *LARGE, "plan.max_tokens_per_gpu=8192", env=env)
    assert done.returncode == 0, done.stdout[-6000:]
