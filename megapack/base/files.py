"""Reads that cannot block on a pipe, what a file is, atomic writes, strict JSON."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path
from typing import Any

from megapack.errors import ConfigError, brief, reason_of

GZIP = b"\x1f\x8b"
# With the first byte of a header: a CSV may have a column PAR1.
PARQUET = b"PAR1\x15"
ZIP = b"PK\x03\x04"
HEAD_BYTES = 4096
# How files begin that are not UTF-8 text: what each is, and what to do. Longer ones come first.
_KINDS = (
    (b"\xff\xfe\0\0", "UTF-32 text; save it as UTF-8"),
    (b"\0\0\xfe\xff", "UTF-32 text; save it as UTF-8"),
    (b"\xff\xfe", "UTF-16 text; save it as UTF-8"),
    (b"\xfe\xff", "UTF-16 text; save it as UTF-8"),
    (GZIP, "compressed by gzip; unpack it with gunzip"),
    (b"BZh", "compressed by bzip2; unpack it with bunzip2"),
    (b"\xfd7zXZ\0", "compressed by xz; unpack it with unxz"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd; unpack it with unzstd"),
    (ZIP, "a zip archive; unpack it"),
    (PARQUET, "a Parquet file; give text"),
    (b"ARROW1", "an Arrow file; write Parquet or text instead"),
    (b"\xff\xff\xff\xff", "an Arrow stream; write Parquet or text instead"),
    (b"\x93NUMPY", "an array of numpy.save; write it by numpy.savetxt instead"),
    (b"\x80", "a pickle, which may run code; write text instead"),
    (b"version https://git-lfs", "a Git LFS pointer in place of the file; run git lfs pull"),
    (b"<!doctype html", "an HTML page; download the file itself"),
    (b"<html", "an HTML page; download the file itself"),
)


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


def what_it_is(data: bytes) -> str | None:
    """What a file is if it is no UTF-8 text, and what to do; None if it may be text.

    Args:
        data: the file, or how it begins.
    """
    head = data[:HEAD_BYTES]
    begins = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    for start, kind in _KINDS:
        if head.startswith(start) or begins.startswith(start):
            return kind
    if 0 not in head:
        return None
    # Most text has a 0 in most of its even bytes, or in most of the odd ones.
    few, many = sorted((head[::2].count(0), head[1::2].count(0)))
    if 4 * many > len(head) > 32 * few:
        return "UTF-16 text; save it as UTF-8"
    return f"binary (byte {head.index(0)} is 0; was it copied in full?); give text"


def text_of(data: bytes) -> str:
    """A file's UTF-8 text without its byte order mark.

    Raises:
        ValueError: it is something else. The message says what, and what to do.
    """
    kind = what_it_is(data)
    if kind is not None:
        raise ValueError(f"it is {kind}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(not_utf8(error)) from None


def not_utf8(error: UnicodeDecodeError) -> str:
    """The message for bytes that are no UTF-8."""
    return (
        f"byte {error.start} (0x{error.object[error.start]:02x}) is not UTF-8; save the file as "
        "UTF-8 (from Latin-1: iconv -f LATIN1 -t UTF-8)"
    )


def read_text(path: str | Path, most_bytes: int = -1) -> str:
    """`text_of` what `read_whole` reads."""
    return text_of(read_whole(path, most_bytes))


def misplaced(path: str | Path) -> str:
    """The end of an error about a file of text or tensors: what it is instead; "" if that is not
    plain, or it cannot be read."""
    try:
        head = read_whole(path, HEAD_BYTES)
    except OSError:
        return ""
    kind = None if 0 in head else what_it_is(head)
    return "" if kind is None else f": {Path(path).name} is {kind}"


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
    # Nobody knows the name before: neither another writer, nor who would put a link there.
    part = target.with_name(f"{target.name}.{uuid.uuid4().hex}.part")
    try:
        with open(part, "xb") as file:
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
        why = reason_of(error)
        raise ConfigError(f"{path}: cannot be written ({why}); set another -o") from None


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
