"""Runs code in a separate interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any


def child(code: str) -> dict[str, Any]:
    """Run the code in a job of one rank; returns the JSON object that it prints last."""
    env = {k: v for k, v in os.environ.items() if k != "RANK"} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        capture_output=True,
        text=True,
        timeout=180,
        env=env,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result
