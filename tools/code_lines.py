"""Count code lines: those that are not blank, not a comment and not a docstring.

    python tools/code_lines.py [FOLDER ...]    # megapack, by room

A good docstring costs nothing. A room is a folder with the folders in it, in `job` each
folder of it; "modules" are those beside the rooms.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODULES = "modules"
HOSTS_APART = ("hosts.patching", "hosts.startup")
"""Rooms of hosts/ beside the hosts: they import none of them."""


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


def room_of(module: str) -> str:
    """The room of a module of the package, by dotted names.

    >>> [room_of(module) for module in ("plan.check", "layout", "job.config.model", "hosts.slime")]
    ['plan', 'layout', 'job.config', 'hosts']
    """
    first, *below = module.split(".")
    child = ".".join((first, *below[:1]))
    return child if first == "job" or child in HOSTS_APART else first


def by_room(package: Path) -> Counter[str]:
    """The code lines of each room of a package; modules beside the rooms are one."""
    rooms: Counter[str] = Counter()
    for path in sorted(package.rglob("*.py")):
        room = room_of(".".join(path.relative_to(package).with_suffix("").parts))
        is_folder = (package / room.replace(".", "/")).is_dir()
        rooms[room if is_folder else MODULES] += code_lines(path)
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
