"""`tools/gpu_check.sh` on a CPU. This is a sample of it; `REHEARSE=1 tools/gpu_check.sh` is all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.marks import needs_te
from tests.megatron import HAS_HYBRID
from tools.benching.gpu_report import REHEARSED

pytestmark = [pytest.mark.rehearsal, needs_te]


def test_a_sample_of_the_check_passes_and_says_that_it_is_a_rehearsal(
    repo_root: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        [repo_root / "tools" / "gpu_check.sh"],
        env={
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            **{"REHEARSE": "sample", "PYTHON": sys.executable, "OUT": str(tmp_path)},
            "TRACES": str(tmp_path / "absent"),
        },
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    report = json.loads((tmp_path / "gpu_report.json").read_text())
    assert report["rehearsed"]
    tests = report["tests"]
    plain = {"bf16", "isolation", "shared_prefixes", "split_samples", "waits"}
    assert tests["varlen"].keys() == {*plain, "hybrid"}
    features = {f"windows{rows}_varlen" for rows in ("", "_shared", "_split")}
    assert tests["features"].keys() == {*features, "mamba_varlen", "deterministic_varlen"}
    skipped = {
        f"{job}/{part}"
        for job, parts in tests.items()
        for part, found in parts.items()
        if "skipped" in found
    }
    assert skipped == (set() if HAS_HYBRID else {"varlen/hybrid", "features/mamba_varlen"})
    assert len(tests["pytest"]) > 3
    (model,) = report["models"]
    ((cell,), device) = model["cells"], model["device"]
    assert "rehearses" in device
    assert list(cell["ways"]) == ["one sample", "padded", "packed, te", "packed, varlen", "dense"]
    for way in cell["ways"].values():
        assert all(len(seconds) == 2 for seconds in way["seconds"].values())
        assert way["peak_bytes"] > 0
    assert min(cell["host"]["planning_seconds"] + cell["host"]["adapter_seconds"]) > 0
    text = (tmp_path / "gpu_report.md").read_text()
    assert REHEARSED in text
    assert "- nothing\n" in text
