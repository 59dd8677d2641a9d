"""Files read without waiting for ever, and written whole or not at all; strict JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megapack.errors import ConfigError, brief


def read_whole(path: str | Path, most_bytes: int = -1) -> bytes:
    """The bytes of a file; of a named pipe that nobody writes to, none.

    Args:
        most_bytes: read no more than these; -1 = all.

    Raises:
        OSError: it cannot be read.
        ValueError: the path has a NUL in it.
    """
    with open(path, "rb", opener=_without_waiting) as file:
        return file.read(most_bytes)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all: whoever reads it sees the old content or the new one.

    A link stays, what it points to is written. A device or a pipe is written into: it must not be
    replaced by a file.

    Raises:
        OSError: it cannot be written; nothing is left beside it.
    """
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        with open(path, "wb", opener=_without_waiting) as file:
            file.write(data)
        return
    target = Path(os.path.realpath(path))
    part = target.with_name(f"{target.name}.part")
    try:
        with open(part, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
        sync(target.parent)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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


def strict_json(text: str) -> Any:
    """The value of a JSON text. A doubled key is an error: one of its values would be lost.

    Raises:
        json.JSONDecodeError: not valid JSON (a ValueError with the position).
        ValueError: a doubled key, brackets too deep, or an integer that Python does not read. The
            message is one line.
    """
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise ValueError("brackets too deep") from None


def _without_waiting(path: str, flags: int) -> int:
    """Opening a named pipe waits for its other end, unless told not to."""
    handle = os.open(path, flags | os.O_NONBLOCK, 0o666)
    os.set_blocking(handle, True)
    return handle


def _each_once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"key {brief(key)} stands twice")
        values[key] = value
    return values


# `json.loads` would make a decoder for every text.
_DECODER = json.JSONDecoder(object_pairs_hook=_each_once)
