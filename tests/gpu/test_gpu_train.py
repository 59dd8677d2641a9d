"""`megapack train` on a GPU: saved while it trains, resumed, and out of memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

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
TIMEOUT_S = 600 if REHEARSED else 60


def train(
    folder: Path, *overrides: str, env: dict[str, str] | None = None
) -> tuple[str, list[dict[str, Any]]]:
    """The output of a run in a folder, and its metrics by step."""
    folder.mkdir(exist_ok=True)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "megapack", "train", str(CONFIG), *SETTINGS, *overrides]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    lines = (folder / "runs/run/metrics.jsonl").read_text().splitlines()
    return done.stdout, [json.loads(line) for line in lines]


def test_a_run_saves_while_it_trains_and_resumes(tmp_path: Path) -> None:
    saving = ["train.save_interval=1", "train.async_save=true"]
    _, whole = train(tmp_path / "whole", *saving)
    assert len(whole) == 4
    train(tmp_path / "cut", *saving, "train.num_batches=1")
    _, resumed = train(tmp_path / "cut", *saving, "train.resume=auto")
    assert [line["step"] for line in resumed] == [line["step"] for line in whole]
    for line, expected in zip(resumed, whole, strict=True):
        # The backward of attention adds up in any order.
        assert line["loss"] == pytest.approx(expected["loss"], rel=0.02, abs=1e-3)
        assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.05)


@pytest.mark.skipif(REHEARSED, reason="a CPU does not run out of memory")
def test_a_step_that_runs_out_of_memory_is_repeated_in_shorter_rows(tmp_path: Path) -> None:
    share = MEMORY_GIB * 2**30 / torch.cuda.get_device_properties(0).total_memory
    env = {"PYTORCH_CUDA_ALLOC_CONF": f"per_process_memory_fraction:{share:.4f}"}
    output, (line,) = train(tmp_path, *LARGE, "train.on_oom=replan", env=env)
    assert line["num_oom_replans"] >= 1, output[-3000:]
    assert line["updated"] == 1
    _, (wanted,) = train(tmp_path / "small", *LARGE, "plan.max_tokens_per_gpu=8192")
    assert line["loss"] == pytest.approx(wanted["loss"], rel=0.02, abs=1e-3)
    assert line["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=0.05)
