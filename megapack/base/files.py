"""Reads that cannot block on a pipe, atomic writes, strict JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from megapack.errors import ConfigError, brief


def read_whole(path: str | Path, most_bytes: int = -1) -> bytes:
    """The bytes of a file. A named pipe without a writer reads as empty instead of blocking.

    Args:
        most_bytes: read at most this many; -1 = all.

    Raises:
        OSError: the file cannot be read.
        ValueError: the path contains a NUL.
    """
    with open(path, "rb", opener=_without_waiting) as file:
        return file.read(most_bytes)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file atomically: a reader sees either the old content or the new one.

    A symbolic link is kept and its target is written. Devices and pipes are written in place: they
    must not be replaced by a file.

    Raises:
        OSError: the file cannot be written; no partial file is left.
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
    """Wait until a file's content, or a folder's entries, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_output(path: str | Path, content: str | bytes) -> None:
    """`write_whole` for the output file of a command.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        write_whole(Path(path), content)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise ConfigError(f"{path}: cannot be written ({reason}); set another -o") from None


def strict_json(text: str) -> Any:
    """Parse JSON. A duplicate key is an error, because one of its values would be lost.

    Raises:
        json.JSONDecodeError: not valid JSON (a ValueError with the position).
        ValueError: a duplicate key, nesting too deep, or an integer with more digits than Python
            reads. The message is one line.
    """
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise ValueError("brackets too deep") from None


def _without_waiting(path: str, flags: int) -> int:
    """An opener for `open`. Without O_NONBLOCK, opening a named pipe waits for its other end."""
    handle = os.open(path, flags | os.O_NONBLOCK, 0o666)
    os.set_blocking(handle, True)
    return handle


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for place, key in enumerate(keys) if key in keys[:place])
        raise ValueError(f"key {brief(twice)} appears twice")
    return values


# Made once: `json.loads` with a hook makes a new decoder in each call.
_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys)
