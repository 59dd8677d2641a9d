"""The first commands of docs/first_model.md: a toy is made, trained on a CPU, and exported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.dist


def test_a_toy_is_made_trained_and_exported(tmp_path: Path, repo_root: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for command in ("data toy toy", "train sft_toy_cpu", "export runs/sft_toy_cpu -o trained"):
        done = subprocess.run(
            [sys.executable, "-m", "megapack", *command.split()],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(repo_root), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    lines = (tmp_path / "runs/sft_toy_cpu/metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines if '"loss"' in line]
    # A byte of 259 at first, and a digit of ten at last.
    assert 5.3 < losses[0] < 5.8
    assert losses[-1] < 2
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    assert model.config.num_hidden_layers == 2
