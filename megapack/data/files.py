"""Files of samples: readers of JSON Lines and Parquet, and the checks of each line or row.

path -> SampleFile.scan (once, in order), SampleFile.read (one sample) -> LineParser -> fields
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megapack.base.arrays import is_id
from megapack.base.files import strict_json
from megapack.data.tokenizer import ByteTokenizer, Ids
from megapack.errors import ConfigError, DataError

# Keys of a JSON line, and columns of a Parquet file. Other columns are not read.
COLUMNS = (
    *("prompt", "response", "prompt_ids", "response_ids"),
    *("group", "rollout", "reward", "advantage"),
)
SUFFIXES = (".jsonl", ".parquet")
# Rows of Parquet that are converted to Python objects at once.
_ROWS_AT_A_TIME = 1024

Row = bytes | dict[str, Any]
"""One sample as it is in a file: a line of JSON Lines, or the cells of a Parquet row by column."""


class SampleFile(Protocol):
    """A file that can be read in order, and again at a sample's position."""

    def scan(self) -> Iterator[tuple[int, int, Row]]:
        """Yield position, line or row number from 1, and content of each sample in order."""
        ...

    def read(self, position: int) -> Row:
        """Read the sample at a position that `scan` returned."""
        ...


def list_files(path: str | Path) -> list[Path]:
    """The files of `data.path`: the file itself, or a folder's files sorted by name.

    Raises:
        DataError: the folder has neither JSON Lines nor Parquet files.
    """
    path = Path(path)
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
    if not files:
        raise DataError(
            f"{path}: the folder has no file named *{' or *'.join(SUFFIXES)}; check data.path"
        )
    return files


def open_file(path: Path) -> SampleFile:
    """A reader of the file: Parquet if the name ends with .parquet, else JSON Lines.

    Raises:
        ConfigError: pyarrow is needed and not installed.
        DataError: it is a pipe or a device, which cannot be read twice, or not Parquet despite its
            name.
    """
    if path.exists() and not path.is_file():
        raise DataError(f"{path}: not a regular file; set data.path to a file or a folder of files")
    return ParquetFile(path) if path.suffix == ".parquet" else JsonLinesFile(path)


class JsonLinesFile:
    """One JSON object per line, blank lines skipped; a position is a byte offset."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def scan(self) -> Iterator[tuple[int, int, bytes]]:
        """See `SampleFile`."""
        start = 0
        try:
            with open(self._path, "rb") as file:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        yield start, number, line
                    start += len(line)
        except (OSError, ValueError) as error:
            raise unreadable(self._path, error) from None

    def read(self, position: int) -> bytes:
        """See `SampleFile`."""
        try:
            with open(self._path, "rb") as file:
                file.seek(position)
                return file.readline()
        except (OSError, ValueError) as error:
            raise unreadable(self._path, error) from None


class ParquetFile:
    """One row per sample with the columns of `COLUMNS`; a position is a row number.

    Raises:
        ConfigError: pyarrow is not installed.
        DataError: it is not a Parquet file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            from pyarrow import ArrowException, parquet
        except ImportError:
            raise ConfigError(f"{path} needs pyarrow; install megapack[parquet]") from None
        self._errors = (OSError, ArrowException)
        try:
            self._file = parquet.ParquetFile(path)
        except self._errors as error:
            raise unreadable(path, error) from None
        # One row group is kept, so reading in the order of positions reads each row group once.
        self._group = -1
        self._rows = None
        self._columns = [name for name in self._file.schema_arrow.names if name in COLUMNS]
        groups = range(self._file.metadata.num_row_groups)
        sizes = [self._file.metadata.row_group(group).num_rows for group in groups]
        self._starts = np.cumsum([0, *sizes])

    def scan(self) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """See `SampleFile`."""
        position = 0
        try:
            for rows in self._file.iter_batches(_ROWS_AT_A_TIME, columns=self._columns):
                for row in rows.to_pylist():
                    yield position, position + 1, _without_nulls(row)
                    position += 1
        except self._errors as error:
            raise unreadable(self._path, error) from None

    def read(self, position: int) -> dict[str, Any]:
        """See `SampleFile`."""
        group = int(np.searchsorted(self._starts, position, side="right")) - 1
        row = self._row_group(group).slice(position - int(self._starts[group]), 1)
        return _without_nulls(row.to_pylist()[0])

    def _row_group(self, group: int) -> Any:
        if group != self._group:
            try:
                self._rows = self._file.read_row_group(group, columns=self._columns)
            except self._errors as error:
                raise unreadable(self._path, error) from None
            self._group = group
        return self._rows


class BadLine(Exception):
    """Why a line is refused; the caller adds file and line number."""


@dataclass(frozen=True)
class LineParser:
    """Parses and checks one sample."""

    tokenizer: ByteTokenizer
    vocab_size: int
    """Token ids must be below it."""

    def parse(self, line: Row) -> dict[str, Any]:
        """The checked fields of one sample.

        Returns:
            `prompt_ids` and `response_ids` (int64), and, if given, `reward`, `advantage` (finite
            floats), `group`, `rollout` (int or str).

        Raises:
            BadLine: the line is not such an object.
        """
        row = _json_object(line) if isinstance(line, bytes) else line
        prompt_ids, response_ids = self._tokens(row)
        if len(prompt_ids) + len(response_ids) == 0:
            raise BadLine(
                "the sample is empty: neither prompt nor response has a token; leave it out"
            )
        fields: dict[str, Any] = {"prompt_ids": prompt_ids, "response_ids": response_ids}
        checks = {"reward": _number, "advantage": _number, "group": _identity, "rollout": _identity}
        for key, check in checks.items():
            # null and absent are the same.
            if row.get(key) is not None:
                fields[key] = check(key, row[key])
        return fields

    def _tokens(self, row: dict[str, Any]) -> tuple[Ids, Ids]:
        text = [key for key in row if key in ("prompt", "response")]
        ids = [key for key in row if key in ("prompt_ids", "response_ids")]
        if text and ids:
            raise BadLine(f"has both {text[0]} and {ids[0]}; give text or ids")
        if text and self.vocab_size < self.tokenizer.vocab_size:
            raise BadLine(
                f"text needs a vocabulary of {self.tokenizer.vocab_size}, the model has "
                f"{self.vocab_size}; set model.vocab_size, or give ids"
            )
        if len(text) == 2:
            return (
                self._encoded(row, "prompt", self.tokenizer.encode_prompt),
                self._encoded(row, "response", self.tokenizer.encode_response),
            )
        if len(ids) == 2:
            return self._ids(row, "prompt_ids"), self._ids(row, "response_ids")
        raise BadLine(
            f"has {' and '.join(text + ids) or 'no tokens'}; give prompt and response, or "
            "prompt_ids and response_ids"
        )

    def _encoded(self, row: dict[str, Any], key: str, encode: Callable[[str], Ids]) -> Ids:
        if not isinstance(row[key], str):
            raise BadLine(f"{key} is {_shown(row[key])}, expected a string")
        try:
            return encode(row[key])
        except UnicodeEncodeError:
            raise BadLine(f"{key} has half of a surrogate pair; write it again") from None

    def _ids(self, row: dict[str, Any], key: str) -> Ids:
        values = row[key]
        if not isinstance(values, list):
            raise BadLine(f"{key} is {_shown(values)}, expected a list of integers")
        for index, value in enumerate(values):
            # bool is a subclass of int, but not a token id.
            if type(value) is not int:
                raise BadLine(f"{key}[{index}] is {_shown(value)}, expected an integer")
            if not 0 <= value < self.vocab_size:
                raise BadLine(
                    f"{key}[{index}] is {_shown(value)}, outside the vocabulary of "
                    f"{self.vocab_size}; set model.vocab_size if the model has more"
                )
        return np.array(values, dtype=np.int64)


def _json_object(line: bytes) -> dict[str, Any]:
    cut_off = "" if line.endswith(b"\n") else "; the last line is cut off"
    remedy = f"{cut_off}; write it again"
    try:
        row = strict_json(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadLine(f"byte {error.start} is not UTF-8{remedy}") from None
    except json.JSONDecodeError as error:
        raise BadLine(f"not JSON: {error.msg} at column {error.colno}{remedy}") from None
    except ValueError as error:
        raise BadLine(f"not JSON: {error}{remedy}") from None
    if not isinstance(row, dict):
        raise BadLine(f"is {_shown(row)}, expected an object with prompt and response")
    return row


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadLine(f"{key} is {_shown(value)}, expected a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise BadLine(f"{key} is {_shown(value)}, expected a finite number")
    return number


def _identity(key: str, value: Any) -> int | str:
    if not is_id(value):
        raise BadLine(f"{key} is {_shown(value)}, expected an int64 or a string")
    return value


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value, default=repr)
    except RecursionError:
        text = "nested brackets"
    return text if len(text) <= 40 else text[:37] + "..."


def _without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """The row without columns that are null in it, like an absent key of JSON."""
    return {name: value for name, value in row.items() if value is not None}


def unreadable(path: Path, error: Exception) -> DataError:
    """The error for a file that could not be opened or read."""
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return DataError(f"{path}: cannot be read ({reason}); check data.path")
