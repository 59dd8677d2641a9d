"""Files written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from megapack.errors import ConfigError


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all: whoever reads it sees the old content or the new one.

    Raises:
        OSError: it cannot be written; nothing is left beside it.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        with open(part, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def write_output(path: str | Path, content: str | bytes) -> None:
    """`write_whole` of what a command was asked for.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        write_whole(Path(path), content)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise ConfigError(f"{path}: cannot be written ({reason}); set another -o") from None
