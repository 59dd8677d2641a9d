"""The index of a data set: where each sample stands and how long it is, found once and kept.

    data.jsonl  ->  .data.jsonl.<key>.megapack-index.npy

Planning needs lengths, groups and rewards of all samples, but tokens only of a rank's own. The
index is one NumPy array without pickled objects, memory-mapped, so that the ranks of a node share
its pages. Its name carries a digest of everything that it depends on: another file, size, time of
change, tokenizer or setting has another name.
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
        ("file", "<i4"),  # number of the file, by name
        ("place", "<i8"),  # byte offset in JSON Lines, row number in Parquet
        ("number", "<i8"),  # line or row, from 1
        ("prompt_tokens", "<i4"),
        ("response_tokens", "<i4"),
        ("group", "<i8"),  # from 0 by first appearance
        ("rollout", "<i8"),  # from 0 by first appearance, over all groups
        ("reward", "<f8"),  # NaN = none
        ("advantage", "<f8"),  # NaN = none
    ]
)
Index = npt.NDArray[np.void]

_FORMAT = 1
_KEY_CHARS = 16
_SUFFIX = ".megapack-index.npy"
_ROWS_AT_A_TIME = 1 << 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadSettings:
    """What samples are read with."""

    tokenizer: ByteTokenizer = dataclasses.field(default_factory=ByteTokenizer)
    vocab_size: int | None = None
    """Token ids must be below it; None = the tokenizer's."""
    max_length: int | None = None
    """Tokens that a sample may have; None = any number."""
    overlong: Overlong = "error"
    """What happens to a sample above `max_length`: it is an error, its first `max_length` tokens
    are kept, or it is left out. A warning counts the latter two."""

    def parser(self) -> LineParser:
        """A parser of rows."""
        own = self.tokenizer.vocab_size
        return LineParser(self.tokenizer, own if self.vocab_size is None else self.vocab_size)

    def read(self, parser: LineParser, row: Any, own_id: str) -> Rollout | None:
        """A row as a sample of at most `max_length` tokens; None where it is skipped.

        Raises:
            BadLine: the row cannot be taken.
        """
        return self.fit(self.parse(parser, row, own_id))

    def parse(self, parser: LineParser, row: Any, own_id: str) -> Rollout:
        """A row as a sample of any length.

        Raises:
            BadLine: the row cannot be taken.
        """
        return Rollout(**{"group": own_id, "rollout": own_id, **parser.parse(row)})

    def fit(self, record: Rollout) -> Rollout | None:
        """The sample itself, its first `max_length` tokens, or None where it is skipped.

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
    """The index of `data.path`, memory-mapped; made and kept where it is not there yet.

    Args:
        path: a file, or a folder of files, which count as one file in the order of their names.
        spare_folder: where it is kept when the data's own folder cannot be written.

    Raises:
        DataError: a file cannot be read or has a bad sample; file, line and reason.
    """
    files = list_files(path)
    key = index_key(files, settings)
    places = [_cached(path, key, folder) for folder in (_data_folder(path), spare_folder)]
    for cached in places:
        with contextlib.suppress(OSError, ValueError, EOFError):
            return _read(cached)
    for cached in places:
        if _writable(cached.parent):
            _write(cached, files, settings)
            # Changed while they were read: the index is of neither state.
            if index_key(files, settings) != key:
                cached.unlink()
                raise DataError(f"{path} changes while it is read; start when it is complete")
            return _read(cached)
    raise DataError(
        f"the index of {path} can be written neither to {places[0].parent} nor to "
        f"{places[1].parent}; set runs_dir to a folder that can be written"
    )


def index_key(files: Sequence[Path], settings: ReadSettings) -> str:
    """A digest of all that an index depends on."""
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
    """The index in pieces, from reading every sample once."""
    builder = _Builder(settings)
    for number, path in enumerate(files):
        reader = open_file(path)
        yield from builder.pieces(number, path, reader)
    yield builder.piece()
    builder.report(files[0] if len(files) == 1 else files[0].parent)


class _Builder:
    """Collects rows; numbers groups and rollouts by their first appearance."""

    def __init__(self, settings: ReadSettings) -> None:
        self._settings, self._parser = settings, settings.parser()
        self._groups: dict[Any, int] = {}
        self._rollouts: dict[Any, int] = {}
        self._rows: list[tuple[Any, ...]] = []
        self.num_samples = self.num_skipped = self.num_truncated = 0

    def pieces(self, file: int, path: Path, reader: SampleFile) -> Iterator[Index]:
        for place, number, row in reader.scan():
            try:
                whole = self._settings.parse(self._parser, row, f"{file} line-{number}")
                record = self._settings.fit(whole)
            except BadLine as bad:
                raise DataError(f"{path}:{number}: {bad}") from None
            if record is None:
                self.num_skipped += 1
                continue
            self.num_truncated += record.num_tokens < whole.num_tokens
            self._rows.append((file, place, number, *self._columns(record)))
            if len(self._rows) == _ROWS_AT_A_TIME:
                yield self.piece()

    def piece(self) -> Index:
        """The rows since the last piece."""
        piece = np.array(self._rows, dtype=INDEX_DTYPE)
        self.num_samples += len(self._rows)
        self._rows.clear()
        return piece

    def report(self, path: Path) -> None:
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


def _write(cached: Path, files: Sequence[Path], settings: ReadSettings) -> None:
    """Write the index aside, piece by piece, and give it its name when it is whole."""
    # Not by the process id, which processes on two nodes that share the folder may have alike; and
    # not by tempfile, whose files are for their owner alone.
    part = cached.with_name(f"{cached.name}.{uuid.uuid4().hex}.part")
    try:
        with open(part, "xb") as file:
            header = {"descr": INDEX_DTYPE.descr, "fortran_order": False, "shape": (10**12,)}
            np.lib.format.write_array_header_1_0(file, header)
            start, num_rows = file.tell(), 0
            for piece in build_index(files, settings):
                file.write(piece.tobytes())
                num_rows += len(piece)
            # The header is padded to a fixed length: it takes the true count afterwards.
            file.seek(0)
            np.lib.format.write_array_header_1_0(file, {**header, "shape": (num_rows,)})
            assert file.tell() == start, "the header's length depends on the count"
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, cached)
    finally:
        part.unlink(missing_ok=True)
    _remove_outdated(cached)


def _remove_outdated(cached: Path) -> None:
    """Remove indexes of the same data under other keys."""
    name = cached.name.removesuffix(_SUFFIX)
    same_data = re.compile(re.escape(name[:-_KEY_CHARS]) + f"[0-9a-f]{{{_KEY_CHARS}}}")
    for other in cached.parent.iterdir():
        outdated = other.name.endswith(_SUFFIX) and other != cached
        if outdated and same_data.fullmatch(other.name.removesuffix(_SUFFIX)):
            other.unlink(missing_ok=True)


def _read(cached: Path) -> Index:
    index = np.load(cached, mmap_mode="r", allow_pickle=False)
    if index.dtype != INDEX_DTYPE:
        raise ValueError(f"{cached} has other columns")
    return index  # type: ignore[no-any-return]


def _data_folder(path: str | Path) -> Path:
    path = Path(path)
    return path if path.is_dir() else path.parent


def _cached(path: str | Path, key: str, folder: Path) -> Path:
    return folder / f".{Path(path).resolve().name}.{key}{_SUFFIX}"


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(prefix=".megapack-probe-", dir=folder):
            pass
    except OSError:
        return False
    return True
