"""Files of sample lengths: CSV, JSON, Parquet, or standard input.

A file is read once, row by row, into a `LengthTable`. How it begins decides its format. Of text, an
object means JSON Lines, a number alone one length per line, and anything else is the header of a
CSV whose cells end with commas, tabs or semicolons. A cell is a whole
number or a list of token ids, whose items are counted. Text and chats are counted by a tokenizer.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import re
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megapack.base.arrays import MAX_LENGTH, Ids, Ints, is_id
from megapack.base.files import GZIP, HEAD_BYTES, PARQUET, read_whole, text_of, what_it_is
from megapack.config.typed import shown
from megapack.errors import ConfigError, DataError, brief, first_line
from megapack.images import Images, of_patches
from megapack.job.data.files import Lines, not_json_lines, unreadable
from megapack.job.data.lines import json_object
from megapack.job.data.messages import BadLine
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
# Columns of text, chats and pairs, see `rollouts`, and what else chats are called.
_TEXTS = {"messages", "conversations", "prompt", "response", "chosen", "rejected", "text"}
_TEXTS |= {"chosen_ids", "rejected_ids"}
# A column of this name has numbers: a list in it is no sample's token ids.
_COUNTS = ("len", "length", "lengths", "lens", "num_tokens")
# 18 digits always fit into int64.
_WHOLE = re.compile(r"-?[0-9]{1,18}")
# As pandas and numpy.savetxt write whole numbers too: 1587.0, 1.587e+03.
_NUMBER = re.compile(r"-?[0-9]{1,18}(\.[0-9]*)?(e[+-]?[0-9]{1,2})?", re.IGNORECASE)

Records = Iterator[tuple[str, dict[str, Any]]]
"""Where a row is, such as "line 3", and its cells by column."""


class _Uncounted(DataError):
    """The samples have text, which only a tokenizer counts."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns to read.

    Raises:
        ConfigError: the names contradict each other.
    """

    length: str | None = None
    """Tokens of each sample. If prompt and response are None too, the column is found by its
    name."""
    prompt: str | None = None
    """Tokens of each prompt, in place of `length`; needs --response-column."""
    response: str | None = None
    """Tokens of each response, in place of `length`; needs --prompt-column."""
    rollout: str | None = None
    """Samples with equal values stay in one optimizer step."""
    colocate: str | None = None
    """Samples with equal values stay in one micro-batch."""
    group: str | None = None
    """Samples with equal values have the same prompt, whose tokens rows may share. Needs columns of
    prompts and responses."""
    adapter: str | None = None
    """Samples with equal values train the same adapter."""
    patches: str | None = None
    """Patches of each image of a sample: a list, or numbers apart by blanks or commas. Samples of
    one group have the same images."""

    def __post_init__(self) -> None:
        has_parts = self.prompt is not None, self.response is not None
        if has_parts not in ((False, False), (self.length is None,) * 2):
            raise ConfigError(
                f"length column {self.length!r}, prompt column {self.prompt!r}, response column "
                f"{self.response!r}; set both of prompt and response, or length alone"
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
        if texts := [name for name in names if name in _TEXTS]:
            raise _Uncounted(f"has {', '.join(texts)}")
        raise DataError(
            f"no column of lengths among {_listed(names)}; set --length-column, or "
            "--prompt-column and --response-column"
        )

    def needed(self, names: list[str]) -> list[str]:
        """The columns to read; all columns if one is missing, so that the error can list them."""
        needed = [*self.summands(names), *self.ids.values()]
        needed += [] if self.patches is None else [self.patches]
        return needed if set(needed) <= set(names) else names

    @property
    def ids(self) -> dict[str, str]:
        """The columns of ids that are given, by field."""
        given = {name: getattr(self, name) for name in ("rollout", "colocate", "group", "adapter")}
        return {name: column for name, column in given.items() if column is not None}


@dataclass(frozen=True)
class LengthTable:
    """Lengths and ids of a file's samples."""

    lengths: Ints
    """int64 [n], each at least 1."""
    rollout_ids: Ids | None
    colocate_ids: Ids | None
    adapter_ids: Ids | None
    columns: str
    """The columns that were read as the length, such as `prompt_len + response_len`."""
    prefixes: SharedPrefixes | None = None
    """Prompts that samples have in common; None if the file does not say."""
    images: list[Images] | None = None
    """Of each sample; None if the file does not say."""


def read_length_file(path: str, columns: Columns, config: str | None = None) -> LengthTable:
    """Read the lengths of a file.

    Args:
        path: a file, perhaps compressed by gzip; "-" = standard input.
        columns: the columns to read.
        config: path or name of a config, which says how text is tokenized; None = text is refused.

    Raises:
        DataError: the file cannot be read or does not hold lengths. The message has file and line.
        ConfigError: pyarrow is needed and not installed.
    """
    name = "standard input" if path == STDIN else path
    try:
        return _read(path, columns)
    except _Uncounted as error:
        if config is None or path == STDIN:
            raise DataError(
                f"{name}: {error}, which a tokenizer counts; give lengths or token ids, or a file "
                "of JSON Lines or Parquet and --config with its tokenizer"
            ) from None
        return _tokenized(path, columns, config)
    except ConfigError:
        raise
    except ValueError as error:
        raise DataError(f"{name}: {error}") from None
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(name, error, "give a file of lengths") from None


def _tokenized(path: str, columns: Columns, config_name: str) -> LengthTable:
    """The samples that a run with this config would train."""
    from megapack.config.load import load_config
    from megapack.config.shipped import find_config
    from megapack.job.config.sections import TrainConfig
    from megapack.job.data.batches import read_settings
    from megapack.job.data.dataset import Dataset

    if columns not in (Columns(), Columns(group="group")):
        raise ConfigError(
            f"{path} is counted by the tokenizer of --config, which knows its columns; leave the "
            "--...-column options out, but for --group-column group"
        )
    config = load_config(find_config(config_name), [], TrainConfig)
    spare_folder = Path(config.runs_dir) / ".index"
    data = Dataset.from_files(path, read_settings(config), spare_folder, config.data.workers)
    numbers = np.arange(len(data))
    pairs = data.pair_ids(numbers)
    return LengthTable(
        data.lengths,
        tuple(data.rollout_ids(numbers)),
        None if pairs is None else tuple(pairs),
        None,
        f"counted by the tokenizer {config.tokenizer_folder or 'of bytes'}",
        None if columns.group is None else data.prefixes(numbers),
        data.images(numbers) if config.model.vision != "off" else None,
    )


def _read(path: str, columns: Columns) -> LengthTable:
    is_file = path != STDIN
    data = read_whole(path, HEAD_BYTES) if is_file else sys.stdin.buffer.read()
    if is_file and (data.startswith(PARQUET) or Path(path).suffix == ".parquet"):
        kind = what_it_is(data)
        if kind is not None and not data.startswith(PARQUET):
            raise DataError(f"not .parquet, it is {kind}")
        return _read_rows(_parquet_rows(path, columns), columns)
    data = read_whole(path) if is_file else data
    data = gzip.decompress(data) if data.startswith(GZIP) else data
    return _read_rows(_text_rows(data), columns)


def _read_rows(rows: Records, columns: Columns) -> LengthTable:
    first = next(rows, None)
    if first is None:
        raise DataError("no samples; give one row per sample")
    summands = columns.summands(list(first[1]))
    if columns.group is not None and len(summands) == 1:
        raise DataError(
            f"groups {_one_line(columns.group)!r} and no column of prompts beside "
            f"{_one_line(summands[0])!r}; set --prompt-column and --response-column"
        )
    lengths: list[int] = []
    prompt_tokens: list[int] = []
    ids: dict[str, list[int | str]] = {name: [] for name in columns.ids}
    images: list[Images] = []
    for place, row in itertools.chain([first], rows):
        try:
            counts = [_count(row, column) for column in summands]
            lengths.append(_length(counts, summands))
            prompt_tokens.append(counts[0])
            for name, column in columns.ids.items():
                ids[name].append(_identity(row, column))
            if columns.patches is not None:
                group = ids["group"][-1] if columns.group else f"line {len(images)}"
                images.append(_images(row, columns.patches, group, lengths[-1]))
        except DataError as error:
            raise type(error)(f"{place}: {error}") from None
    groups = ids.get("group")
    return LengthTable(
        np.array(lengths, dtype=np.int64),
        _ids(ids.get("rollout")),
        _ids(ids.get("colocate")),
        _ids(ids.get("adapter")),
        _sum(summands),
        None if groups is None else SharedPrefixes.from_groups(groups, prompt_tokens),
        images if columns.patches is not None else None,
    )


def _images(row: dict[str, Any], column: str, group: int | str, length: int) -> Images:
    value = _cell(row, column)
    # pandas writes a list into CSV with brackets and commas; without images a cell may be empty.
    text = "" if value is None else str(value).strip("[]").replace(",", " ")
    numbers = value if isinstance(value, list) else text.split()
    if not all(_WHOLE.fullmatch(str(n)) and int(n) >= 4 and int(n) % 4 == 0 for n in numbers):
        raise DataError(
            f"{_one_line(column)} is {shown(value)}; give the patches of each image, multiples of "
            "4, which are one token, or nothing without images"
        )
    found = of_patches([int(n) for n in numbers], str(group))
    if found and found[-1].end >= length:
        raise DataError(
            f"{_one_line(column)} are {found[-1].end} image tokens, 4 patches each, and the sample "
            f"has {length}; give it more tokens than those of its images"
        )
    return found


def _length(counts: list[int], summands: tuple[str, ...]) -> int:
    length = sum(counts)
    what = _sum(summands)
    for column, count in zip(summands, counts, strict=True):
        if count < 0 and len(counts) > 1:
            raise DataError(f"{_one_line(column)} is {brief(count)}; give 0 or more tokens")
    if length < 1:
        raise DataError(f"{what} is {brief(length)}; give at least 1 token per sample")
    if length > MAX_LENGTH:
        raise DataError(f"{what} is {brief(length)}; a sample has at most {MAX_LENGTH} tokens")
    return length


def _count(row: dict[str, Any], column: str) -> int:
    value = _cell(row, column)
    name = _one_line(column)
    if isinstance(value, list):
        if set(map(type, value)) - {int}:
            raise _Uncounted(f"{name} is a list of other things than token ids")
        if column.lower().endswith(_COUNTS):
            raise DataError(f"{name} is a list of {len(value)}; give one number per sample")
        return len(value)
    number = value
    if isinstance(value, str):
        # `strip` also removes separators such as \x1c, which `float` refuses.
        text = value.strip()
        if _NUMBER.fullmatch(text):
            number = float(text)
        elif column in _TEXTS:
            raise _Uncounted(f"{name} is text")
    if type(number) is float and number.is_integer():
        number = int(number)
    if type(number) is not int:
        raise DataError(f"{name} is {shown(value)}; give a whole number of tokens")
    return number


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


def _ids(values: list[int | str] | None) -> Ids | None:
    """The ids unchanged, except that strings become integers if all of them are whole numbers.

    ("7", "8") becomes (7, 8), but ("7", "07") stays as it is.
    """
    if values is None:
        return None
    if all(
        isinstance(value, str) and _WHOLE.fullmatch(value) and str(int(value)) == value
        for value in values
    ):
        return tuple(int(value) for value in values)
    return tuple(values)


def _one_line(name: str) -> str:
    return (name if name.isprintable() else repr(name))[:40]


def _sum(columns: tuple[str, ...]) -> str:
    return " + ".join(map(_one_line, columns))


def _listed(names: list[str]) -> str:
    shown_names = ", ".join(map(_one_line, names[:12]))
    return shown_names + (f" and {len(names) - 12} more" if len(names) > 12 else "")


def _text_rows(data: bytes) -> Records:
    text = text_of(data)
    start = text.lstrip()[:1]
    if start in ("{", "["):
        if kind := not_json_lines(text.encode()):
            raise DataError(f"it is {kind}")
        return _json_rows(text)
    # `str.splitlines` also splits at characters that cells may hold, such as U+2028.
    lines = list(io.StringIO(text, newline=""))
    numbered = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    header = numbered[0][1] if numbered else ""
    if _NUMBER.fullmatch(header):
        return ((f"line {number}", {"length": line}) for number, line in numbered)
    return _csv_rows(lines, max(",\t;", key=header.count))


def _json_rows(text: str) -> Records:
    for number, line in Lines(1, text.encode()).rows():
        try:
            yield f"line {number}", json_object(line, "an object per line")
        except BadLine as error:
            raise DataError(f"line {number}: {error}") from None


def _csv_rows(lines: list[str], delimiter: str) -> Records:
    reader = csv.reader(lines, delimiter=delimiter)
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
                yield f"line {reader.line_num}", dict(zip(names, cells, strict=True))
    except csv.Error as error:
        raise DataError(f"line {reader.line_num}: not CSV ({error}); write it again") from None


def _header(cells: list[str], number: int) -> list[str]:
    names = [cell.strip() for cell in cells]
    for name in names:
        if re.fullmatch(r"[-+.0-9]+", name):
            raise DataError(
                f"line {number}: {brief(name)} is not a column name; begin with a header, or give "
                "one whole number per line"
            )
        if names.count(name) > 1:
            raise DataError(f"line {number}: column {brief(name)} stands twice; keep one of them")
    return names


def _parquet_rows(path: str, columns: Columns) -> Records:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise ConfigError("Parquet needs pyarrow; pip install pyarrow") from None
    try:
        with parquet.ParquetFile(path) as file:
            batches = file.iter_batches(columns=columns.needed(file.schema_arrow.names))
            rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
            for number, row in enumerate(rows, start=1):
                yield f"row {number}", row
    except ArrowException as error:
        raise DataError(f"not Parquet ({first_line(error)}); write it again") from None
