"""The GPU benchmark on a CPU: all of its code except the GPU kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.weekly

TOY = "configs/gpt_tiny_dp2_pp2_vpp2_cpu.yaml"


def test_a_toy_runs_every_way_and_mode(repo_root: Path, tmp_path: Path) -> None:
    trace = tmp_path / "lengths.csv"
    trace.write_text("prompt_len,response_len\n" + "5,60\n30,200\n8,0\n0,90\n" * 20)
    command = [sys.executable, "tools/bench_gpu.py", "--device", "cpu", "--config", TOY]
    command += ["--tokens", "2000", "--trace", str(trace), "--seconds", "120"]
    command += ["--out", str(tmp_path), "plan.max_tokens_per_gpu=512", "data.max_length=200"]
    done = subprocess.run(
        command,
        cwd=repo_root,
        env={**os.environ, "PYTHONPATH": str(repo_root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "gpu_report.json").read_text())
    ((cell,),) = [model["cells"] for model in found["models"]]
    assert list(cell["ways"]) == ["one sample", "padded", "packed, sdpa", "dense"]
    for way in cell["ways"].values():
        assert all(min(seconds) > 0 for seconds in way["seconds"].values())
        assert set(way["warmup_seconds"]) == {"train", "forward", "logprobs"}
    ways = cell["ways"]
    assert ways["one sample"]["num_microbatches"] == cell["num_samples"]
    assert ways["packed, sdpa"]["row_tokens"] == cell["tokens"] < ways["padded"]["row_tokens"]
    assert ways["dense"]["tokens"] == ways["dense"]["row_tokens"]
    assert cell["longest"] == 200
    assert min(cell["host"]["planning_seconds"] + cell["host"]["adapter_seconds"]) > 0
    assert (tmp_path / "gpu_report.md").read_text() in done.stdout + "\n"
