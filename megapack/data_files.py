"""Files of samples, read in order once and then one by one: JSON Lines and Parquet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megapack.errors import ConfigError, DataError

# What a Parquet file may have, and the keys of a line; other columns are not even read.
COLUMNS = (
    *("prompt", "response", "prompt_ids", "response_ids"),
    *("group", "rollout", "reward", "advantage"),
)
SUFFIXES = (".jsonl", ".parquet")
_ROWS_AT_A_TIME = 1024

Row = bytes | dict[str, Any]


class SampleFile(Protocol):
    """A file whose samples can be read again by where they stand."""

    def scan(self) -> Iterator[tuple[int, int, Row]]:
        """Place, number from 1, and content of each sample in order."""
        ...

    def read(self, place: int) -> Row:
        """The sample at a place that `scan` gave."""
        ...


def list_files(path: str | Path) -> list[Path]:
    """The files of `data.path`: itself, or those of a folder, by name.

    Raises:
        DataError: nothing is there, or the folder has neither JSON Lines nor Parquet.
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
    """A reader by the file's name: Parquet where it ends so, else JSON Lines.

    Raises:
        ConfigError: pyarrow is needed and not installed.
        DataError: a pipe or a device, which cannot be read twice; no Parquet by that name.
    """
    if path.exists() and not path.is_file():
        raise DataError(f"{path}: no regular file; set data.path to a file or a folder of files")
    return ParquetFile(path) if path.suffix == ".parquet" else JsonLinesFile(path)


class JsonLinesFile:
    """One JSON object per line, blank lines passed over; a place is a byte offset."""

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

    def read(self, place: int) -> bytes:
        """See `SampleFile`."""
        try:
            with open(self._path, "rb") as file:
                file.seek(place)
                return file.readline()
        except (OSError, ValueError) as error:
            raise unreadable(self._path, error) from None


class ParquetFile:
    """One row per sample with the columns of `COLUMNS`; a place is a row number.

    Raises:
        ConfigError: pyarrow is not installed.
        DataError: it is no Parquet file.
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
        # One row group is kept: whoever reads in the order of places reads each group once.
        self._group, self._rows = -1, None
        self._columns = [name for name in self._file.schema_arrow.names if name in COLUMNS]
        groups = range(self._file.metadata.num_row_groups)
        sizes = [self._file.metadata.row_group(group).num_rows for group in groups]
        self._starts = np.cumsum([0, *sizes])

    def scan(self) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """See `SampleFile`."""
        place = 0
        try:
            for rows in self._file.iter_batches(_ROWS_AT_A_TIME, columns=self._columns):
                for row in rows.to_pylist():
                    yield place, place + 1, _without_nulls(row)
                    place += 1
        except self._errors as error:
            raise unreadable(self._path, error) from None

    def read(self, place: int) -> dict[str, Any]:
        """See `SampleFile`."""
        group = int(np.searchsorted(self._starts, place, side="right")) - 1
        row = self._row_group(group).slice(place - int(self._starts[group]), 1)
        return _without_nulls(row.to_pylist()[0])

    def _row_group(self, group: int) -> Any:
        if group != self._group:
            try:
                self._rows = self._file.read_row_group(group, columns=self._columns)
            except self._errors as error:
                raise unreadable(self._path, error) from None
            self._group = group
        return self._rows


def _without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """A column that is null in this row is one that the row has not."""
    return {name: value for name, value in row.items() if value is not None}


def unreadable(path: Path, error: Exception) -> DataError:
    """The error for a file that could not be opened or read."""
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return DataError(f"{path}: cannot be read ({reason}); check data.path")
