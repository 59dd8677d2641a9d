"""A short soak: a pipeline with two faults, compared with an undisturbed run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.weekly, pytest.mark.dist]


def test_a_run_with_faults_takes_the_same_steps(repo_root: Path, tmp_path: Path) -> None:
    kinds = ["rank stopped, goes on", "killed while saving"]
    options = ["--steps", "40", "--faults", "2", "--kinds", *kinds, "--world", "2"]
    done = subprocess.run(
        [sys.executable, "tools/soak.py", *options, "--out", str(tmp_path / "soak")],
        cwd=repo_root,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "steps: 40, 0 differences" in done.stdout
    assert all(f" {kind} " in done.stdout for kind in kinds)
    assert "rank 1 groups" in done.stdout
