"""Every bad input gives its documented error: one line, the numbers, what to set.

A refused call leaves no files behind.
"""

from __future__ import annotations

import doctest
import re
import shlex
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest

import megapack.errors
from tests.bad_input import Content, Line, Row, batches, calls, folders
from tests.bad_input.command_lines import FINDING_LENGTHS, FINDINGS, LINES

pytestmark = pytest.mark.unit

ROWS: list[Row] = calls.ROWS + batches.ROWS + folders.ROWS
Call = Callable[..., tuple[int, str, str]]
_SECONDS = 10
_MAX_CHARS = 400
# Every message says what to do, in one of these words.
_ADVICE = re.compile(
    r"\b(set|give|pass|leave|drop|raise|lower|make|plan with|pack with|start|save|write|name|keep|"
    r"check|install|resume|divide|call|unset|change|did you mean|valid keys are|expected|must be|"
    r"configs are)\b"
)


@pytest.fixture(scope="module")
def compiled() -> None:
    """Compile the planner's kernels before any test is timed; without a cache that takes long."""
    calls.plan()


@pytest.fixture(autouse=True)
def in_time(compiled: None) -> Iterator[None]:
    """Fail a test that hangs, on a named pipe for example."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"ran past {_SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, _SECONDS)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make(folder: Path, files: dict[str, Content]) -> None:
    for name, content in files.items():
        if callable(content):
            content(folder / name)
        else:
            data = content if isinstance(content, bytes) else content.encode()
            (folder / name).write_bytes(data)


def listing(folder: Path) -> dict[str, int]:
    """Paths and sizes of everything in the folder."""
    return {str(path): path.lstat().st_size for path in sorted(folder.rglob("*"))}


def check_message(message: str, words: tuple[str, ...]) -> None:
    """Check a message's form, and that it contains these words."""
    assert "\n" not in message
    assert len(message) <= _MAX_CHARS
    assert _ADVICE.search(message), message
    assert words
    missing = [word for word in words if word not in message]
    assert missing == [], message


def test_doctest_of_the_errors() -> None:
    result = doctest.testmod(megapack.errors)
    assert (result.attempted, result.failed) == (1, 0)


def test_the_table_is_long_and_its_names_are_unique() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS) >= 200
    assert len(LINES) >= 60


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_call_is_refused(row: Row, folder: Path) -> None:
    make(folder, row.files)
    before = listing(folder)
    with pytest.raises(row.error) as caught:
        row.call()
    assert issubclass(row.error, ValueError | RuntimeError)
    # The class itself or a direct subclass.
    assert row.error in type(caught.value).__mro__[:2]
    check_message(str(caught.value), row.words)
    assert listing(folder) == before


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line.args[:60]}: {line.words[0][:30]}")
def test_a_command_line_is_refused(line: Line, folder: Path, call: Call) -> None:
    make(folder, line.files)
    before = listing(folder)
    code, out, err = call(*shlex.split(line.args))
    (message,) = err.splitlines()
    assert (code, out) == (2, "")
    assert message.startswith("megapack: ")
    check_message(message, line.words)
    assert listing(folder) == before


@pytest.mark.parametrize(
    ("content", "words"), [row[1:] for row in FINDINGS], ids=[row[0] for row in FINDINGS]
)
def test_an_edited_plan_is_found_out(
    content: Content, words: tuple[str, ...], folder: Path, call: Call
) -> None:
    make(folder, {"p.json": content, "lengths.txt": FINDING_LENGTHS})
    code, out, err = call("check", "p.json", "lengths.txt")
    assert (code, err) == (1, "")
    (finding,) = out.splitlines()
    assert finding.startswith("p.json: ")
    assert [word for word in words if word not in finding] == [], finding
