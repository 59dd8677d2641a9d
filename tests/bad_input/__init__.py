"""Tables of bad inputs and their errors; `tests/unit/repository/test_bad_input.py` runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megapack import MegapackError

Content = str | bytes | Callable[[Path], object]
"""Content of a file, or a function that makes the file at a path."""


@dataclass(frozen=True)
class Row:
    """A call that fails in a folder that contains `files`."""

    name: str
    call: Callable[[], object]
    error: type[MegapackError]
    words: tuple[str, ...]
    """Parts of the message: the wrong value, and what to set."""
    files: dict[str, Content]


@dataclass(frozen=True)
class Line:
    """A command line that fails with exit code 2."""

    args: str
    """Arguments after `megapack`, split as by a shell."""
    words: tuple[str, ...]
    files: dict[str, Content]


def row(
    name: str,
    call: Callable[[], object],
    error: type[MegapackError],
    *words: str,
    **files: Content,
) -> Row:
    """A row with its files as keywords: `a_csv=` is the file `a.csv`."""
    return Row(name, call, error, words, _named(files))


def line(args: str, *words: str, **files: Content) -> Line:
    """A line with its files as keywords, as in `row`."""
    return Line(args, words, _named(files))


def _named(files: dict[str, Content]) -> dict[str, Content]:
    return {name.replace("_", "."): content for name, content in files.items()}
