"""The soak in small: two starts of a pipeline under faults, and one without."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.dist]


def test_a_run_under_faults_takes_the_same_steps(repo_root: Path, tmp_path: Path) -> None:
    # The seed draws a rank that is stopped for a while, and a death with a checkpoint half written.
    options = ["--steps", "40", "--faults", "2", "--seed", "26", "--world", "2"]
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
    assert "rank stopped" in done.stdout
    assert "killed while saving" in done.stdout
    assert "rank 1 groups" in done.stdout
