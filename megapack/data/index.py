"""The index of a data set: position and lengths of each sample, computed once and stored in a file.

    data.jsonl  ->  .data.jsonl.<key>.megapack-index.npy

A rank needs the lengths, prompt groups and rewards of all samples to plan, but only the tokens of
the samples that it packs. The index is one NumPy array without pickled objects. It is
memory-mapped, so the ranks of a node share its pages. The key in its name is a digest of everything
that it depends on: paths, file sizes, modification times, tokenizer and settings.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import os
import re
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megapack.base.choices import Overlong
from megapack.data.files import (
    BadLine,
    LineParser,
    Row,
    SampleFile,
    list_files,
    open_file,
    unreadable,
)
from megapack.data.rollouts import Rollout
from megapack.data.tokenizer import ByteTokenizer
from megapack.errors import DataError

logger = logging.getLogger(__name__)

INDEX_DTYPE = np.dtype(
    [
        ("file", "<i4"),  # number of the file, from 0 in the order of names
        ("place", "<i8"),  # byte offset in JSON Lines, row number in Parquet
        ("number", "<i8"),  # line or row, from 1
        ("prompt_tokens", "<i4"),
        ("response_tokens", "<i4"),
        ("group", "<i8"),  # prompt group, from 0 by first appearance
        ("rollout", "<i8"),  # from 0 by first appearance in the data set
        ("reward", "<f8"),  # NaN = not given
        ("advantage", "<f8"),  # NaN = not given
    ]
)
Index = npt.NDArray[np.void]

# Part of the key. Increase it when INDEX_DTYPE or the meaning of a column changes.
_FORMAT = 1
# Hexadecimal digits: 64 bits of the digest.
_KEY_CHARS = 16
_SUFFIX = ".megapack-index.npy"
# Samples that are collected before they are written: about 4 MB of the index.
_ROWS_AT_A_TIME = 1 << 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadSettings:
    """How samples are read."""

    tokenizer: ByteTokenizer = dataclasses.field(default_factory=ByteTokenizer)
    vocab_size: int | None = None
    """Token ids must be below it; None = the tokenizer's."""
    max_length: int | None = None
    """Largest length of a sample in tokens; None = no limit."""
    overlong: Overlong = "error"
    """How a sample above `max_length` is treated: "error" refuses it, "truncate" keeps its first
    `max_length` tokens, "skip" leaves it out. A warning says how many were truncated or skipped."""

    def parser(self) -> LineParser:
        """A parser with this tokenizer and vocabulary."""
        vocab_size = self.tokenizer.vocab_size if self.vocab_size is None else self.vocab_size
        return LineParser(self.tokenizer, vocab_size)

    def read(self, parser: LineParser, row: Row, own_id: str) -> Rollout | None:
        """Parse a sample and apply `overlong`; None if the sample is skipped.

        Args:
            own_id: prompt group and rollout of a sample that gives none.

        Raises:
            BadLine: the sample is refused.
        """
        return self.fit(self.parse(parser, row, own_id))

    def parse(self, parser: LineParser, row: Row, own_id: str) -> Rollout:
        """Parse a sample of any length; arguments as for `read`.

        Raises:
            BadLine: the sample is refused.
        """
        return Rollout(**{"group": own_id, "rollout": own_id, **parser.parse(row)})

    def fit(self, record: Rollout) -> Rollout | None:
        """Apply `overlong`: the sample, its first `max_length` tokens, or None if it is skipped.

        Raises:
            BadLine: it is too long, and `overlong` is "error".
        """
        most = self.max_length
        if most is None or record.num_tokens <= most:
            return record
        if self.overlong == "error":
            raise BadLine(
                f"{record.num_tokens} tokens, max_length is {most}; raise it, or set overlong to "
                "truncate or skip"
            )
        if self.overlong == "skip":
            return None
        prompt_ids = record.prompt_ids[:most]
        response_ids = record.response_ids[: most - len(prompt_ids)]
        return dataclasses.replace(record, prompt_ids=prompt_ids, response_ids=response_ids)


def load_index(path: str | Path, settings: ReadSettings, spare_folder: Path) -> Index:
    """Load the index of `data.path`, memory-mapped; build and store it first if there is none.

    Args:
        path: a file, or a folder of files, which count as one file in the order of their names.
        spare_folder: stores the index if the data's own folder cannot be written.

    Raises:
        DataError: a file cannot be read or has a bad sample. The message has file, line and reason.
    """
    files = list_files(path)
    key = index_key(files, settings)
    paths = [_index_path(path, key, folder) for folder in (_data_folder(path), spare_folder)]
    for index_path in paths:
        with contextlib.suppress(OSError, ValueError, EOFError):
            return _read(index_path)
    for index_path in paths:
        if _writable(index_path.parent):
            _write(index_path, files, settings)
            # If the files changed during the reading, the index fits neither the old nor the new.
            if index_key(files, settings) != key:
                index_path.unlink()
                raise DataError(f"{path} changes while it is read; start when it is complete")
            return _read(index_path)
    raise DataError(
        f"the index of {path} can be written neither to {paths[0].parent} nor to "
        f"{paths[1].parent}; set runs_dir to a folder that can be written"
    )


def index_key(files: Sequence[Path], settings: ReadSettings) -> str:
    """A digest of everything that an index depends on."""
    states = [_state(file) for file in files]
    tokenizer = f"{type(settings.tokenizer).__qualname__} {settings.tokenizer.vocab_size}"
    rest = (settings.vocab_size, settings.max_length, settings.overlong)
    return hashlib.sha256(repr((_FORMAT, states, tokenizer, rest)).encode()).hexdigest()[
        :_KEY_CHARS
    ]


def _state(file: Path) -> tuple[str, int, int]:
    try:
        return str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns
    except (OSError, ValueError) as error:
        # A path with a NUL is a ValueError.
        raise unreadable(file, error) from None


def build_index(files: Sequence[Path], settings: ReadSettings) -> Iterator[Index]:
    """Read every sample once and yield the index in pieces."""
    builder = _Builder(settings)
    for number, path in enumerate(files):
        reader = open_file(path)
        yield from builder.pieces(number, path, reader)
    yield builder.piece()
    builder.report(files[0] if len(files) == 1 else files[0].parent)


class _Builder:
    """Collects index rows; numbers prompt groups and rollouts by their first appearance."""

    def __init__(self, settings: ReadSettings) -> None:
        self._settings = settings
        self._parser = settings.parser()
        self._groups: dict[Any, int] = {}
        self._rollouts: dict[Any, int] = {}
        self._rows: list[tuple[Any, ...]] = []
        self.num_samples = 0
        self.num_skipped = 0
        self.num_truncated = 0

    def pieces(self, file: int, path: Path, reader: SampleFile) -> Iterator[Index]:
        """Add a file's samples and yield each full piece."""
        for position, number, row in reader.scan():
            try:
                whole = self._settings.parse(self._parser, row, f"{file} line-{number}")
                record = self._settings.fit(whole)
            except BadLine as bad:
                raise DataError(f"{path}:{number}: {bad}") from None
            if record is None:
                self.num_skipped += 1
                continue
            self.num_truncated += record.num_tokens < whole.num_tokens
            self._rows.append((file, position, number, *self._columns(record)))
            if len(self._rows) == _ROWS_AT_A_TIME:
                yield self.piece()

    def piece(self) -> Index:
        """The rows collected since the last piece."""
        piece = np.array(self._rows, dtype=INDEX_DTYPE)
        self.num_samples += len(self._rows)
        self._rows.clear()
        return piece

    def report(self, path: Path) -> None:
        """Warn of skipped and truncated samples; raise DataError if no sample is left."""
        most = self._settings.max_length
        if self.num_skipped:
            logger.warning("%s: %d samples above %s tokens skipped", path, self.num_skipped, most)
        if self.num_truncated:
            logger.warning("%s: %d samples truncated to %s tokens", path, self.num_truncated, most)
        if self.num_samples == 0:
            raise DataError(
                f"{path} has no sample ({self.num_skipped} were above max_length={most}); give "
                "at least one"
            )

    def _columns(self, record: Rollout) -> tuple[Any, ...]:
        nan = float("nan")
        return (
            len(record.prompt_ids),
            len(record.response_ids),
            self._groups.setdefault(record.group, len(self._groups)),
            self._rollouts.setdefault(record.key, len(self._rollouts)),
            nan if record.reward is None else record.reward,
            nan if record.advantage is None else record.advantage,
        )


def _write(index_path: Path, files: Sequence[Path], settings: ReadSettings) -> None:
    """Write the index piece by piece under another name, and rename it when it is complete."""
    # A process id would not be unique: two nodes may share the folder. tempfile would not do
    # either: only the owner may read its files.
    part = index_path.with_name(f"{index_path.name}.{uuid.uuid4().hex}.part")
    try:
        with open(part, "xb") as file:
            # The number of rows is not known yet; 10**12 stands in for it.
            header = {"descr": INDEX_DTYPE.descr, "fortran_order": False, "shape": (10**12,)}
            np.lib.format.write_array_header_1_0(file, header)
            start = file.tell()
            num_rows = 0
            for piece in build_index(files, settings):
                file.write(piece.tobytes())
                num_rows += len(piece)
            # NumPy pads the header to a fixed length, so the true count fits into the same bytes.
            file.seek(0)
            np.lib.format.write_array_header_1_0(file, {**header, "shape": (num_rows,)})
            assert file.tell() == start, "the header's length depends on the count"
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, index_path)
    finally:
        part.unlink(missing_ok=True)
    _remove_outdated(index_path)


def _remove_outdated(index_path: Path) -> None:
    """Remove indexes of the same data under other keys."""
    name = index_path.name.removesuffix(_SUFFIX)
    same_data = re.compile(re.escape(name[:-_KEY_CHARS]) + f"[0-9a-f]{{{_KEY_CHARS}}}")
    for other in index_path.parent.iterdir():
        is_other_index = other.name.endswith(_SUFFIX) and other != index_path
        if is_other_index and same_data.fullmatch(other.name.removesuffix(_SUFFIX)):
            other.unlink(missing_ok=True)


def _read(index_path: Path) -> Index:
    index = np.load(index_path, mmap_mode="r", allow_pickle=False)
    if index.dtype != INDEX_DTYPE:
        raise ValueError(f"{index_path} has other columns")
    return index  # type: ignore[no-any-return]


def _data_folder(path: str | Path) -> Path:
    path = Path(path)
    return path if path.is_dir() else path.parent


def _index_path(path: str | Path, key: str, folder: Path) -> Path:
    return folder / f".{Path(path).resolve().name}.{key}{_SUFFIX}"


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(prefix=".megapack-probe-", dir=folder):
            pass
    except OSError:
        return False
    return True
