"""Runs code in a separate interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def python_path(*folders: Path) -> str:
    """PYTHONPATH with these folders first, and what this process has after them.

    tools/test_versions.sh puts a Megatron-Core there.
    """
    inherited = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([*map(str, folders), *filter(None, [inherited])])


def child(code: str, *, path: Path | None = None, timeout_s: float = 180) -> dict[str, Any]:
    """Run the code in a job of one rank; returns the JSON object that it prints last.

    Args:
        path: a folder of packages that this process does not have.
    """
    env = {k: v for k, v in os.environ.items() if k != "RANK"} | {"OMP_NUM_THREADS": "1"}
    if path is not None:
        env["PYTHONPATH"] = python_path(ROOT, path)
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=env,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result
