"""Files written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all: whoever reads it sees the old text or the new one.

    Raises:
        OSError: it cannot be written; nothing is left beside it.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        with open(part, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
