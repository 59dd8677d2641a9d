"""Files of sample lengths: CSV, JSON Lines, Parquet, `.npy`, or standard input.

A file is read once, row by row, into a `LengthTable`. The first line of a text decides its format:
an object means JSON Lines, a whole number alone means one length per line, and anything else is the
header of a CSV. A cell is a whole number or a list of token ids, whose items are counted.
"""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megapack.base.arrays import MAX_LENGTH, Ids, Ints, is_id, read_lengths
from megapack.base.files import read_whole, strict_json
from megapack.config.typed import shown
from megapack.errors import ConfigError, DataError, brief, first_line
from megapack.prefixes import SharedPrefixes

STDIN = "-"

# Columns to look for if the user names none of them: the first of `_LENGTHS` in the file, else the
# first pair of `_SUMS`, whose sum is the length.
_LENGTHS = [
    *("length", "len", "total_len", "total_length", "num_tokens", "tokens", "seq_len", "seqlen"),
    "input_ids",
]
_SUMS = [
    (first + unit, second + unit)
    for first, second in (("prompt", "response"), ("prompt", "completion"), ("input", "output"))
    for unit in ("_len", "_length", "_tokens", "_ids")
]
# 18 digits always fit into int64.
_WHOLE = re.compile(r"-?[0-9]{1,18}")
# `str.splitlines` also splits at characters that JSON allows inside a string, such as U+2028.
_LINE_END = re.compile(r"\r\n?|\n")

Records = Iterator[tuple[int, dict[str, Any]]]
"""Line or row number from 1, and the row's cells by column."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns to read.

    Raises:
        ConfigError: the names contradict each other.
    """

    length: str | None = None
    """Tokens of a sample. If prompt and response are None too, the column is found by its name."""
    prompt: str | None = None
    response: str | None = None
    """Tokens of the sample's two parts, instead of `length`."""
    rollout: str | None = None
    """Samples with equal values stay in one optimizer step."""
    colocate: str | None = None
    """Samples with equal values stay in one micro-batch."""
    group: str | None = None
    """Samples with equal values have the same prompt, whose tokens rows may share. Needs columns of
    prompts and responses."""

    def __post_init__(self) -> None:
        if (self.prompt is None) != (self.response is None):
            raise ConfigError(
                f"prompt column {self.prompt!r}, response column {self.response!r}; set both, or "
                "a length column instead"
            )
        if self.length is not None and self.prompt is not None:
            raise ConfigError(
                f"length column {self.length!r} and prompt column {self.prompt!r} given; set one "
                "of them"
            )

    def summands(self, names: list[str]) -> tuple[str, ...]:
        """The columns whose sum is a sample's length.

        Raises:
            DataError: no column of the file is a length. The message lists the columns.
        """
        if self.length is not None:
            return (self.length,)
        if self.prompt is not None and self.response is not None:
            return self.prompt, self.response
        for columns in [*((name,) for name in _LENGTHS), *_SUMS]:
            if set(columns) <= set(names):
                return columns
        if len(names) == 1:
            return (names[0],)
        raise DataError(
            f"no column of lengths among {_listed(names)}; set --length-column, or "
            "--prompt-column and --response-column"
        )

    def prompts(self, names: list[str]) -> str | None:
        """The column of prompts; None if the length is one column.

        Raises:
            DataError: there are groups and no prompts.
        """
        summands = self.summands(names)
        if len(summands) > 1:
            return summands[0]
        if self.group is not None:
            raise DataError(
                f"groups {_one_line(self.group)!r} and no column of prompts beside "
                f"{_one_line(summands[0])!r}; set --prompt-column and --response-column"
            )
        return None

    def needed(self, names: list[str]) -> list[str]:
        """The columns to read; all columns if one is missing, so that the error can list them."""
        ids = (self.rollout, self.colocate, self.group)
        id_columns = [name for name in ids if name is not None]
        needed = [*self.summands(names), *id_columns]
        return needed if set(needed) <= set(names) else names


@dataclass(frozen=True)
class LengthTable:
    """Lengths and ids of a file's samples."""

    lengths: Ints
    """int64 [n], each at least 1."""
    rollout_ids: Ids | None
    colocate_ids: Ids | None
    columns: str
    """The columns that were read as the length, such as `prompt_len + response_len`."""
    prefixes: SharedPrefixes | None = None
    """Prompts that samples have in common; None if the file does not say."""


def read_length_file(path: str, columns: Columns) -> LengthTable:
    """Read the lengths of a file.

    Args:
        path: a file: `.parquet`, `.npy`, or text under any other name; "-" = text on standard
            input.
        columns: the columns to read.

    Raises:
        DataError: the file cannot be read or does not hold lengths. The message has file and line.
        ConfigError: pyarrow is needed and not installed.
    """
    name = "standard input" if path == STDIN else path
    try:
        if path.endswith(".npy"):
            return _read_npy(Path(path), columns)
        parquet = path.endswith(".parquet")
        rows = _parquet_rows(Path(path), columns) if parquet else _text_rows(path)
        return _read_rows(rows, columns)
    except DataError as error:
        raise DataError(f"{name}: {error}") from None
    except (OSError, EOFError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise DataError(f"{name}: cannot be read ({reason}); give a file of lengths") from None


def _read_npy(path: Path, columns: Columns) -> LengthTable:
    if columns != Columns():
        raise DataError("an array has no columns; leave the --...-column options out")
    try:
        array = np.load(io.BytesIO(read_whole(path)), allow_pickle=False)
    except (ValueError, MemoryError) as error:
        raise DataError(
            f"not an array of numbers ({first_line(error)}); save one with numpy.save"
        ) from None
    return LengthTable(read_lengths(array), None, None, "array")


def _read_rows(rows: Records, columns: Columns) -> LengthTable:
    first = next(rows, None)
    if first is None:
        raise DataError("no samples; give one row per sample")
    summands = columns.summands(list(first[1]))
    prompts = columns.prompts(list(first[1]))
    groups: list[int | str] = []
    prompt_tokens: list[int] = []
    lengths: list[int] = []
    rollouts: list[int | str] = []
    colocated: list[int | str] = []
    for number, row in _chain(first, rows):
        try:
            lengths.append(_length(row, summands))
            if columns.rollout is not None:
                rollouts.append(_identity(row, columns.rollout))
            if columns.colocate is not None:
                colocated.append(_identity(row, columns.colocate))
            if columns.group is not None and prompts is not None:
                groups.append(_identity(row, columns.group))
                prompt_tokens.append(_count(row, prompts))
        except DataError as error:
            raise DataError(f"line {number}: {error}") from None
    return LengthTable(
        np.array(lengths, dtype=np.int64),
        _ids(rollouts) if columns.rollout is not None else None,
        _ids(colocated) if columns.colocate is not None else None,
        _sum(summands),
        None if columns.group is None else SharedPrefixes.from_groups(groups, prompt_tokens),
    )


def _chain(first: tuple[int, dict[str, Any]], rows: Records) -> Records:
    yield first
    yield from rows


def _length(row: dict[str, Any], summands: tuple[str, ...]) -> int:
    length = sum(_count(row, column) for column in summands)
    what = _sum(summands)
    if length < 1:
        raise DataError(f"{what} is {brief(length)}; a sample has at least 1 token")
    if length > MAX_LENGTH:
        raise DataError(f"{what} is {brief(length)}; a sample has at most {MAX_LENGTH} tokens")
    return length


def _count(row: dict[str, Any], column: str) -> int:
    value = _cell(row, column)
    if isinstance(value, list):
        return len(value)
    # `strip` also removes separators such as \x1c, which `int` refuses.
    if isinstance(value, str) and _WHOLE.fullmatch(stripped := value.strip()):
        value = int(stripped)
    if type(value) is not int:
        raise DataError(f"{_one_line(column)} is {shown(value)}; give a whole number of tokens")
    if value < 0:
        raise DataError(f"{_one_line(column)} is {brief(value)}; give 0 or more tokens")
    return value


def _identity(row: dict[str, Any], column: str) -> int | str:
    value = _cell(row, column)
    if not is_id(value) or value == "":
        raise DataError(f"{_one_line(column)} is {shown(value)}; give an int64 or a string")
    return value


def _cell(row: dict[str, Any], column: str) -> Any:
    if column not in row:
        raise DataError(
            f"no column {brief(column)} among {_listed(list(row))}; name one that is there"
        )
    return row[column]


def _ids(values: list[int | str]) -> Ids:
    """The ids unchanged, except that strings become integers if all of them are whole numbers.

    ("7", "8") becomes (7, 8), but ("7", "07") stays as it is.
    """
    if all(isinstance(value, str) and _is_plain_integer(value) for value in values):
        return tuple(int(value) for value in values)
    return tuple(values)


def _is_plain_integer(text: str) -> bool:
    """Whether the text is an integer as `str` prints it."""
    return _WHOLE.fullmatch(text) is not None and str(int(text)) == text


def _one_line(name: str) -> str:
    return (name if name.isprintable() else repr(name))[:40]


def _sum(columns: tuple[str, ...]) -> str:
    return " + ".join(map(_one_line, columns))


def _listed(names: list[str]) -> str:
    shown_names = ", ".join(map(_one_line, names[:12]))
    return shown_names + (f" and {len(names) - 12} more" if len(names) > 12 else "")


def _text_rows(path: str) -> Records:
    data = sys.stdin.buffer.read() if path == STDIN else read_whole(path)
    try:
        lines = _LINE_END.split(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(
            f"byte {error.start} is not UTF-8; give CSV or JSON Lines, or name the file .parquet "
            "or .npy"
        ) from None
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        return iter(())
    start = numbered[0][1].strip()
    if start.startswith("{"):
        return _json_rows(numbered)
    if _WHOLE.fullmatch(start):
        return ((number, {"length": line}) for number, line in numbered)
    return _csv_rows(lines)


def _json_rows(numbered: list[tuple[int, str]]) -> Records:
    for number, line in numbered:
        try:
            row = strict_json(line)
        except ValueError as error:
            cut = " (the last line; is the file cut off?)" if number == numbered[-1][0] else ""
            raise DataError(f"line {number}: not JSON: {error}{cut}; write it again") from None
        if not isinstance(row, dict):
            raise DataError(f"line {number}: is {shown(row)}; give an object per line")
        yield number, row


def _csv_rows(lines: list[str]) -> Records:
    reader = csv.reader(lines)
    names: list[str] = []
    try:
        for cells in reader:
            if not any(cells):
                continue
            if not names:
                names = _header(cells, reader.line_num)
            elif len(cells) != len(names):
                raise DataError(
                    f"line {reader.line_num}: {len(cells)} cells under {len(names)} columns; give "
                    "one cell per column"
                )
            else:
                yield reader.line_num, dict(zip(names, cells, strict=True))
    except csv.Error as error:
        raise DataError(f"line {reader.line_num}: not CSV ({error}); write it again") from None


def _header(cells: list[str], number: int) -> list[str]:
    names = [cell.strip() for cell in cells]
    for name in names:
        if _is_number(name):
            raise DataError(
                f"line {number}: {brief(name)} is not a column name; begin with a header, or give "
                "one whole number per line"
            )
        if names.count(name) > 1:
            raise DataError(f"line {number}: column {brief(name)} stands twice; keep one of them")
    return names


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _parquet_rows(path: Path, columns: Columns) -> Records:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise ConfigError(f"{path} needs pyarrow; install megapack[parquet]") from None
    try:
        with parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(columns=columns.needed(file.schema_arrow.names)):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except ArrowException as error:
        raise DataError(f"not Parquet ({first_line(error)}); write it again") from None
