"""Count code lines: those that are not blank, not a comment and not a docstring.

    python tools/code_lines.py [FOLDER ...]    # megapack, by room

A good docstring costs nothing. A room is a folder with the folders in it; "modules" are those
beside the rooms.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODULES = "modules"


def code_lines(path: Path) -> int:
    """The code lines of a Python file."""
    text = path.read_text(encoding="utf-8")
    words: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        # Also the text below a field, which is its docstring.
        is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_constant and isinstance(node.value.value, str):
            words.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return sum(
        number not in words and bool(line.strip()) and not line.lstrip().startswith("#")
        for number, line in enumerate(text.splitlines(), 1)
    )


def by_room(package: Path) -> Counter[str]:
    """The code lines of each room of a package."""
    rooms: Counter[str] = Counter()
    for path in sorted(package.rglob("*.py")):
        folder, *below = path.relative_to(package).parts
        rooms[folder if below else MODULES] += code_lines(path)
    return rooms


def main(*folders: str) -> None:
    """Print the rooms of each folder, the largest first."""
    for folder in map(Path, folders or (str(ROOT / "megapack"),)):
        rooms = by_room(folder)
        print(f"{folder.name} {sum(rooms.values())}")
        for room, lines in rooms.most_common():
            print(f"  {lines:6} {room}")


if __name__ == "__main__":
    main(*sys.argv[1:])
