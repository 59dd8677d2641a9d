"""A number that a page quotes stands in a file of docs/measured to which its section links."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from tests.documents import ROOT
from tools.count_words import FENCE, pages, reader, words
from tools.make_what_was_run import PAGE, page
from tools.pages.measured import MEASURED, Head

pytestmark = pytest.mark.unit

QUOTING = [p for p in pages() if reader(p) != "measured"]
REFERENCE = ("configuration.md", "commands.md")
"""Long pages in which one looks up a name."""

_NOT_READ = re.compile(r"<!--.*?-->|`[^`]*`|(?<=\])\([^)\s]*\)|arXiv[: ]?[\d.]+", re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s#]*)(?:#[^)]*)?\)")
_HEADING = re.compile(r"^#{1,6} ", re.MULTILINE)
_UNITS = "%|s|ms|min|times|x|[KMGT]i?B|TFLOP/s|tokens/s|tokens per second|nats"
_NUMBER = r"(?<![\w.,-])\d[\d,]*(?:\.\d+)?(?:e-?\d+)?"
# Not a part of a word or of a version; a full stop may follow.
_ENDS = rf"(?=\s*(%)(?![\w/]))|(?=\s(?:{_UNITS})(?![\w/]))|(?!\w|\.\d)"
_QUOTED = re.compile(rf"({_NUMBER})(?:{_ENDS})")
_CELL = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")


def sections(text: str) -> list[str]:
    """A page's parts from one heading to the next, without blocks of code."""
    text = FENCE.sub("", text)
    starts = [0, *(m.start() for m in _HEADING.finditer(text)), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(starts)]


def quoted(section: str) -> list[tuple[str, bool]]:
    """Numbers that look measured, as they are written, and whether each is a percentage."""
    found = []
    text = _NOT_READ.sub("", section)
    for match in _QUOTED.finditer(text):
        number, percent = match.group(1), bool(match.group(2))
        unit = re.match(rf"\s?(?:{_UNITS})(?![\w/])", text[match.end() :])
        if ("." in number or "e-" in number or percent or unit) and float(
            number.replace(",", "")
        ) not in (0, 1, 100):
            found.append((number, percent))
    return found


def is_in(number: str, percent: bool, cells: list[float]) -> bool:
    """Whether a cell is the number when rounded to its digits, or 1 - the number."""
    plain = number.replace(",", "")
    mantissa, _, exponent = plain.partition("e")
    digits = len(mantissa.partition(".")[2]) - int(exponent or 0)
    value, half = float(plain), 0.501 * 10.0**-digits
    ways = [cells, [1 - c for c in cells]]
    if percent:
        ways += [[100 * c for c in cells], [100 * (1 - c) for c in cells]]
        ways += [[100 * (c - 1) for c in cells]]
    return any(abs(cell - value) <= half for way in ways for cell in way)


def linked(section: str, folder: Path) -> list[Path]:
    targets = [(folder / target).resolve() for target in _LINK.findall(section)]
    return [t for t in targets if t.is_relative_to(MEASURED) and t.is_file()]


def wrong(text: str, folder: Path) -> list[str]:
    """Numbers of a page that none of the files has to which their section links."""
    found = []
    for section in sections(text):
        files = linked(section, folder)
        texts = [file.read_text(encoding="utf-8") for file in files]
        cells = [float(c.replace(",", "")) for t in texts for c in _CELL.findall(t)]
        title = section.partition("\n")[0]
        found += [
            f"{title}: {number}{' %' if percent else ''}"
            for number, percent in quoted(section)
            if not is_in(number, percent, cells)
        ]
    return found


def test_numbers_are_found_and_compared(tmp_path: Path) -> None:
    text = "# A\nIt takes 1.07 times as long, 12 % or 3 s on dp8, with `clip 0.2` and 0.16.1.\n"
    assert [number for number, _ in quoted(text)] == ["1.07", "12", "3"]
    assert quoted("# A\nIt takes 1.07.\n") == [("1.07", False)]
    assert is_in("1.07", False, [1.0734])
    assert not is_in("1.08", False, [1.0734])
    assert is_in("18", True, [0.82])
    assert is_in("1.1e-5", False, [1.06e-5])
    assert not is_in("1.2e-5", False, [1.06e-5])
    assert wrong(text, tmp_path) == ["# A: 1.07", "# A: 12 %", "# A: 3"]


@pytest.mark.parametrize("path", QUOTING, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_page_quotes_what_its_tables_have(path: Path) -> None:
    assert wrong(path.read_text(encoding="utf-8"), path.parent) == []


@pytest.mark.parametrize("path", [p for p in MEASURED.glob("*.md") if p != PAGE])
def test_a_table_says_what_made_it(path: Path) -> None:
    head = Head.read(path)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", head.date)
    assert re.fullmatch(r"[0-9a-f]{7,40}\+?", head.commit)


def test_the_page_of_what_was_run_is_that_of_the_files() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python tools/make_what_was_run.py"


def test_users_pages_are_short() -> None:
    counts = {p: words(p.read_text(encoding="utf-8")).read for p in pages() if reader(p) == "users"}
    assert sum(counts.values()) <= 35_000
    long = {p.name: n for p, n in counts.items() if n > 2000 and p.name not in REFERENCE}
    assert long == {}
