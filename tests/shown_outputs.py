"""Output blocks of the documents, and whether a command's output is what its block shows.

A `bash` block has commands, and a `text` block directly after it has what they print. Lines are
equal but for white space and numbers. Numbers are equal to the digits that the block shows, and
`...` stands for any text, or alone on a line for any lines.

    >>> difference("step 1: loss 5.56 ...", "step 1: loss 5.5584  0.60 s")
    >>> difference("step 1: loss 5.57 ...", "step 1: loss 5.5584  0.60 s")
    'step 1: loss 5.57 ...'
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal

from tests.documents import ROOT

_LINES = r"((?:(?!```).*\n)*)"
_PAIR = re.compile(rf"^```bash\n{_LINES}```\n\n?```text\n{_LINES}```$", re.MULTILINE)
_ANY = "..."
_NUMBER = r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?"
# Digits inside a word, such as a digest, are no number.
_PARTS = re.compile(rf"\.\.\.|\s+|(?<![A-Za-z0-9_]){_NUMBER}(?![A-Za-z0-9_])")


@dataclass(frozen=True)
class Shown:
    """Commands of a document, and what it says that they print."""

    commands: str
    output: str

    @property
    def trains(self) -> bool:
        return re.search(r"torchrun|demo\.sh|megapack train", self.commands) is not None


def shown_outputs(document: str) -> list[Shown]:
    """All commands with an output block, in order."""
    text = (ROOT / document).read_text(encoding="utf-8")
    pairs = [Shown(*pair) for pair in _PAIR.findall(text)]
    assert len(pairs) == len(re.findall(r"^```text$", text, re.MULTILINE)), (
        f"{document} has a text block that does not follow a bash block"
    )
    return pairs


def difference(shown: str, printed: str) -> str | None:
    """The first lines of a block that are not in an output; None if it is what the block shows.

    Lines between two `...` are found at the first place where they are; the first and the last
    lines must be those of the output.
    """
    lines = printed.strip("\n").splitlines()
    first, *others = _between(shown.strip("\n").splitlines())
    if not others:
        return None if _equal(first, lines) else "\n".join(first)
    if not _equal(first, lines[: len(first)]):
        return "\n".join(first)
    start = len(first)
    for block in others[:-1]:
        ends = range(start + len(block), len(lines) + 1)
        end = next((end for end in ends if _equal(block, lines[end - len(block) : end])), None)
        if end is None:
            return "\n".join(block)
        start = end
    last = others[-1]
    at_end = start + len(last) <= len(lines) and _equal(last, lines[len(lines) - len(last) :])
    return None if at_end else "\n".join(last)


def _between(lines: list[str]) -> Iterator[list[str]]:
    """Lines before, between and after those that are `...`."""
    block: list[str] = []
    for line in lines:
        if line.strip() == _ANY:
            yield block
            block = []
        else:
            block.append(line)
    yield block


def _equal(shown: list[str], printed: list[str]) -> bool:
    return len(shown) == len(printed) and all(map(_equal_lines, shown, printed))


def _equal_lines(shown: str, printed: str) -> bool:
    parts, numbers, end = [], [], 0
    shown, printed = shown.strip(), printed.strip()
    for part in _PARTS.finditer(shown):
        parts.append(re.escape(shown[end : part.start()]))
        end = part.end()
        if part.group() == _ANY:
            parts.append(".*?")
        elif part.group().isspace():
            parts.append(r"\s+")
        else:
            parts.append(f"({_NUMBER})")
            numbers.append(part.group())
    found = re.fullmatch("".join(parts) + re.escape(shown[end:]), printed)
    return found is not None and all(map(_equal_numbers, numbers, found.groups()))


def _equal_numbers(shown: str, printed: str) -> bool:
    """Whether a number is the one that a block shows, which may be rounded."""
    last, exact = Decimal(shown), Decimal(printed)
    digit, smallest = last.as_tuple().exponent, exact.as_tuple().exponent
    assert isinstance(digit, int)
    assert isinstance(smallest, int)
    if smallest >= digit:
        return last == exact
    return abs(exact - last) <= Decimal(5).scaleb(digit - 1)
