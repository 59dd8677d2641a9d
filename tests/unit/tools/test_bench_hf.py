"""The folder that tools/bench_hf.py makes; the weekly test runs the tool."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from megapack.job.config.model import ModelConfig
from megapack.job.hf.folder import HfFolder
from tools.bench_hf import ROOT, SIZES, compare, make_folder


@pytest.mark.unit
def test_the_folder_is_one_that_loads(tmp_path: Path) -> None:
    num_bytes = make_folder(tmp_path / "model", "toy")
    folder = HfFolder(tmp_path / "model")
    assert len({one.file for one in folder.tensors.values()}) > 1
    files = (tmp_path / "model").glob("*.safetensors")
    assert 0 < sum(file.stat().st_size for file in files) - num_bytes < 10_000
    model = ModelConfig.from_hf(str(folder))
    assert model.hidden_size == SIZES["toy"]["hidden_size"]
    assert compare(folder.path, folder.path) == (len(folder.tensors), len(folder.tensors))


@pytest.mark.weekly
def test_the_tool_runs() -> None:
    done = subprocess.run(
        [sys.executable, "tools/bench_hf.py"],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    counts = re.findall(r"(\d+) of (\d+) exported tensors are bitwise equal", done.stdout)
    assert len(counts) == 2
    assert all(equal == total for equal, total in counts)
