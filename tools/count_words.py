"""Count the words of the documents by kind: prose, cells of tables, and blocks of code.

    python tools/count_words.py [PAGE ...]

Without pages, all of README.md and docs. A word has a letter or a digit; targets of links and
comments are no words. Readers of a page are told by its folder: `docs/maintainers` and
`docs/architecture.md` are for those who change megapack, `docs/measured` has tables that tools
write, and all other pages are for users.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]

FENCE = re.compile(r"^(```|~~~).*?^\1[^\S\n]*$", re.MULTILINE | re.DOTALL)
"""A block of code in a page."""
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_TARGET = re.compile(r"\]\([^)\s]*\)")
_WORD = re.compile(r"[^\s|]*\w[^\s|]*")


class Words(NamedTuple):
    prose: int
    tables: int
    code: int

    @property
    def read(self) -> int:
        """Words that one reads: prose and tables."""
        return self.prose + self.tables


def words(text: str) -> Words:
    code = sum(len(_WORD.findall(block.group())) for block in FENCE.finditer(text))
    rest = _TARGET.sub("]", _COMMENT.sub("", FENCE.sub("", text)))
    counts = {True: 0, False: 0}
    for line in rest.splitlines():
        counts[line.lstrip().startswith("|")] += len(_WORD.findall(line))
    return Words(counts[False], counts[True], code)


def reader(page: Path) -> str:
    """Whom a page is for: "users", "maintainers" or "measured"."""
    relative = page.relative_to(ROOT)
    if relative.parts[:2] == ("docs", "measured"):
        return "measured"
    for_maintainers = relative.parts[:2] == ("docs", "maintainers")
    return "maintainers" if for_maintainers or relative.name == "architecture.md" else "users"


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]


def main() -> None:
    chosen = [Path(name).resolve() for name in sys.argv[1:]] or pages()
    sums: dict[str, list[int]] = {}
    print(f"{'prose':>7} {'tables':>7} {'code':>7}")
    for page in chosen:
        count = words(page.read_text(encoding="utf-8"))
        print(f"{count.prose:7} {count.tables:7} {count.code:7}  {page.relative_to(ROOT)}")
        total = sums.setdefault(reader(page), [0, 0, 0])
        total[:] = [a + b for a, b in zip(total, count, strict=True)]
    for name, (prose, tables, code) in sums.items():
        print(f"{prose:7} {tables:7} {code:7}  {name}: {prose + tables} words to read")


if __name__ == "__main__":
    main()
