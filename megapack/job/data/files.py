"""Files of samples: readers of JSON Lines, plain or compressed by gzip, and Parquet.

path -> read_blocks -> Block.rows -> lines.LineParser
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megapack.base.files import GZIP, HEAD_BYTES, PARQUET, read_whole, what_it_is
from megapack.errors import ConfigError, DataError, brief, reason_of
from megapack.job.data.rollouts import TOKEN_COLUMNS, UNREAD_COLUMNS

# Keys of a JSON line, and columns of a Parquet file. Other columns are not read.
COLUMNS = (
    *("prompt", "response", "prompt_ids", "response_ids", "response_mask", "loss_mask"),
    *("messages", "tools", "chat_template_kwargs"),
    *("chosen", "rejected", "chosen_ids", "rejected_ids"),
    *("group", "rollout", "reward", "advantage", "routed_experts"),
    "images",
    *TOKEN_COLUMNS,
    *UNREAD_COLUMNS,
)
SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
# What is read, and tokenized by one process, at once: about 1000 short chats.
_BLOCK_BYTES = 1 << 20
_BLOCK_ROWS = 512
# Of rows with images, or with the experts of each token, which take kilobytes per token as Python
# lists.
_LARGE_ROWS = {"routed_experts": 4, "images": 32}

Row = bytes | dict[str, Any]
"""One line of JSON Lines, or the cells of a Parquet row by column."""


def list_files(path: str | Path) -> list[Path]:
    """The files of `data.path`: the file itself, or a folder's files sorted by name.

    Raises:
        DataError: the folder has neither JSON Lines nor Parquet files, or a file is a pipe or a
            device.
    """
    path = Path(path)
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.name.endswith(SUFFIXES))
    if not files:
        raise DataError(
            f"{path}: the folder has no file named *{' or *'.join(SUFFIXES)}; check data.path"
        )
    for file in files:
        if file.exists() and not file.is_file():
            raise DataError(
                f"{file}: not a regular file; set data.path to a file or a folder of files"
            )
    return files


def read_blocks(path: Path) -> Iterator[Block]:
    """Yield the whole file in order: Parquet by its beginning or its name, or else JSON Lines.

    Raises:
        ConfigError: pyarrow is needed and not installed.
        DataError: it cannot be read, or is not Parquet despite its name.
    """
    is_parquet = path.suffix == ".parquet" or _head(path).startswith(PARQUET)
    return _parquet_blocks(path) if is_parquet else _line_blocks(path)


def _head(path: Path) -> bytes:
    try:
        return read_whole(path, HEAD_BYTES)
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None


@dataclass(frozen=True)
class Lines:
    """Whole lines of a file of JSON Lines."""

    first: int
    """Number of the first line, from 1."""
    data: bytes

    @property
    def num_bytes(self) -> int:
        """About its share of the file's size."""
        return len(self.data)

    def rows(self) -> Iterator[tuple[int, bytes]]:
        """Yield number, from 1 in the file, and content of each line that is not blank."""
        for number, line in enumerate(io.BytesIO(self.data), start=self.first):
            if line.strip():
                yield number, line


def _line_blocks(path: Path) -> Iterator[Lines]:
    """Of one JSON object per line, blank lines skipped; perhaps compressed by gzip."""
    first = 1
    is_gzip = _head(path).startswith(GZIP)
    try:
        with gzip.GzipFile(path) if is_gzip else open(path, "rb") as file:
            while data := file.read(_BLOCK_BYTES):
                if first == 1 and (other := not_json_lines(data)):
                    raise DataError(f"{path}: it is {other}")
                data += file.readline()
                yield Lines(first, data)
                first += data.count(b"\n")
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(path, error) from None


def not_json_lines(data: bytes) -> str | None:
    """What a file is that begins so, and what to do; None if it may be JSON Lines."""
    kind = what_it_is(data)
    if kind is not None:
        return kind
    begins = data.strip()
    if b"\r" in begins and b"\n" not in begins:
        return "text whose lines end with CR alone; end them with LF (tr '\\r' '\\n')"
    line, _, rest = begins.partition(b"\n")
    is_array = line.startswith(b"[")
    try:
        json.loads(line)
        is_array = is_array and not rest
    except UnicodeDecodeError:
        return None
    except json.JSONDecodeError as error:
        if error.pos == 0 and begins:
            return f"no JSON Lines ({brief(line.decode())}); give one object per line, or Parquet"
        is_open = error.pos >= len(line.decode().rstrip()) - 1
        if not is_array and is_open and rest:
            return "JSON with an object over several lines; write one per line (jq -c . FILE)"
    except (ValueError, RecursionError):
        return None
    return "a JSON array; write one object per line (jq -c '.[]' FILE)" if is_array else None


@dataclass(frozen=True)
class TableRows:
    """Rows of a Parquet file, in Arrow's stream format."""

    first: int
    """Number of the first row, from 1."""
    data: bytes
    num_bytes: int
    """About its share of the file's size."""

    def rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield number, from 1 in the file, and cells of each row."""
        import pyarrow

        with pyarrow.ipc.open_stream(self.data) as stream:
            table = stream.read_all()
        yield from enumerate(table.to_pylist(), start=self.first)


Block = Lines | TableRows
"""Consecutive rows of a file; it can be pickled."""


def _parquet_blocks(path: Path) -> Iterator[TableRows]:
    """Of one row per sample with the columns of `COLUMNS`."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ConfigError(f"{path} needs pyarrow; pip install pyarrow") from None
    errors = (OSError, pyarrow.ArrowException)
    try:
        file = parquet.ParquetFile(path)
    except errors as error:
        kind = what_it_is(_head(path))
        if kind is None or _head(path).startswith(PARQUET):
            raise unreadable(path, error) from None
        raise DataError(f"{path}: not Parquet, it is {kind}") from None
    first = 1
    columns = [name for name in file.schema_arrow.names if name in COLUMNS]
    at_once = min(_LARGE_ROWS.get(name, _BLOCK_ROWS) for name in ("", *columns))
    try:
        for batch in file.iter_batches(at_once, columns=columns):
            out = pyarrow.BufferOutputStream()
            with pyarrow.ipc.new_stream(out, batch.schema) as stream:
                stream.write_batch(batch)
            share = path.stat().st_size * batch.num_rows // file.metadata.num_rows
            yield TableRows(first, out.getvalue().to_pybytes(), share)
            first += batch.num_rows
    except errors as error:
        raise unreadable(path, error) from None


def unreadable(path: str | Path, error: Exception, remedy: str = "check data.path") -> DataError:
    """The error for a file that could not be opened or read."""
    return DataError(f"{path}: cannot be read ({reason_of(error)}); {remedy}")
