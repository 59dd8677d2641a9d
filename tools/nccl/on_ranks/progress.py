"""What a rank of the check has come to, and what it has found so far."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from megapack.base.files import write_whole
from tools.nccl.launch import PROGRESS


def note(text: str) -> None:
    """Note progress: the job's limit of seconds without any begins again."""
    if PROGRESS in os.environ:
        Path(os.environ[PROGRESS]).write_text(text, encoding="utf-8")


def write(out: str, found: dict[str, Any]) -> None:
    """Write what was found so far, on rank 0: whole or not at all, since a job may be killed."""
    if os.environ.get("RANK", "0") == "0":
        write_whole(Path(out), json.dumps(found))
