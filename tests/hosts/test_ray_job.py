"""The Ray job of docs/patching.md, on real Ray: the patch is applied in both actors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import python_blocks

pytestmark = pytest.mark.hosts


def test_the_documents_job_patches_both_actors(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed; pip install ray")
    (job,) = (block for block in python_blocks("docs/patching.md") if "ray.init" in block)
    # A cluster of its own, also where one runs, and a driver that is not patched.
    kept = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "MEGAPACK_PATCH")}
    script = tmp_path / "job.py"
    script.write_text(job + "\nray.shutdown()\n")
    done = subprocess.run(
        [sys.executable, str(script)],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env=kept | {"RAY_USAGE_STATS_ENABLED": "0"},
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("[(")]
    assert len(lines) == 2, done.stdout
    for line in lines:
        assert "('megatron.core.pipeline_parallel.get_forward_backward_func', 'applied')" in line
        assert "waiting" not in line
