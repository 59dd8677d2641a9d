"""What a rank of the check has come to, for whom it would have to hang long to be seen."""

from __future__ import annotations

import os
from pathlib import Path

from tools.nccl.launch import PROGRESS


def note(text: str) -> None:
    """Note progress: the job's limit of seconds without any begins again."""
    if PROGRESS in os.environ:
        Path(os.environ[PROGRESS]).write_text(text, encoding="utf-8")
