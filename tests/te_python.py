"""Transformer Engine's Python for jobs that run it on the CPU; `tools/te_python.sh` brings it."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "MEGAPACK_TEST_TE"
"""The release that a job's ranks have, whose layers models then run (`dist.setup`); "" for none."""
VERSION = "2.11.0"
"""The release that CI runs."""
_FOLDERS = Path(__file__).resolve().parents[1] / ".te"


def te_folder(version: str = VERSION) -> Path:
    """The folder to put on PYTHONPATH; it may be absent."""
    return _FOLDERS / version


def runs_te() -> bool:
    """Whether this process is a rank of a job with Transformer Engine."""
    return bool(os.environ.get(VARIABLE))


def without_te(version: str = VERSION) -> str:
    """Why tests cannot run with a release; "" if they can."""
    if te_folder(version).is_dir():
        return ""
    return f"Transformer Engine's Python is absent: tools/te_python.sh {version}"
