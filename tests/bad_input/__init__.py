"""Bad inputs and their errors; `tests/unit/repository/test_bad_input.py` goes through them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megapack import MegapackError

Content = str | bytes | Callable[[Path], object]
"""Of a file; a function makes it at the path that it is given."""


@dataclass(frozen=True)
class Row:
    """A call that fails, made in a folder that has `files` in it."""

    name: str
    call: Callable[[], object]
    error: type[MegapackError]
    words: tuple[str, ...]
    """What the message holds: the number that is wrong, and what to set."""
    files: dict[str, Content]


@dataclass(frozen=True)
class Line:
    """A command line that fails with exit code 2."""

    args: str
    """Behind `megapack`, as a shell would split them."""
    words: tuple[str, ...]
    files: dict[str, Content]


def row(
    name: str,
    call: Callable[[], object],
    error: type[MegapackError],
    *words: str,
    **files: Content,
) -> Row:
    """`a_csv=` is the file `a.csv`."""
    return Row(name, call, error, words, _named(files))


def line(args: str, *words: str, **files: Content) -> Line:
    """See `row`."""
    return Line(args, words, _named(files))


def _named(files: dict[str, Content]) -> dict[str, Content]:
    return {name.replace("_", "."): content for name, content in files.items()}
