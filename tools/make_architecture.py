"""Draws docs/images/rooms.svg, the rooms of the package, from the imports of megapack/.

    python tools/make_architecture.py

A box is a folder or a module of megapack/; a line is an import between two of them. Lines that
follow from others are left out: `a` imports `c` is not drawn if `a` imports `b` and `b` imports
`c`. The floors are those of docs/architecture.md.
"""

from __future__ import annotations

import ast
import html
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "megapack"
PAGE = ROOT / "docs" / "architecture.md"
PICTURE = ROOT / "docs" / "images" / "rooms.svg"

_BOX_WIDTH = 132
_BOX_HEIGHT = 46
_FLOOR_HEIGHT = 84
_WIDTH = 760
_MARGIN = 14
_HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" \
font-family="sans-serif" text-anchor="middle">
<title>Rooms of megapack and their imports</title>
<rect width="{width}" height="{height}" fill="#ffffff"/>
"""


def main() -> None:
    """Write the picture."""
    PICTURE.write_text(picture(), encoding="utf-8")
    print(f"{PICTURE.relative_to(ROOT)}: {len(import_order())} floors")


def import_order() -> list[list[str]]:
    """The floors of the architecture page, lowest first; a floor imports only lower ones."""
    _, _, rest = PAGE.read_text(encoding="utf-8").partition("```text\nstartup, ")
    line, closed, _ = rest.partition("```")
    if not closed:
        raise ValueError(f"{PAGE}: no block that begins with 'startup, '; write the order there")
    return [floor.split(", ") for floor in " ".join(f"startup, {line}".split()).split(" -> ")]


def room_imports() -> dict[str, set[str]]:
    """Per room the rooms that it imports at import time; functions may import more."""
    found: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).with_suffix("").parts[0]
        if room not in ("__init__", "__main__"):
            found.setdefault(room, set()).update(_imported(ast.parse(path.read_text())))
    return {room: (names - {room}) & found.keys() for room, names in found.items()}


def _imported(tree: ast.Module) -> set[str]:
    names = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            package, _, below = node.module.partition(".")
            rooms = [below.split(".")[0]] if below else [alias.name for alias in node.names]
            names.update(rooms if package == "megapack" else [])
    return names


def needed(imports: dict[str, set[str]]) -> dict[str, set[str]]:
    """The imports that do not follow from others (the transitive reduction)."""
    reached: dict[str, set[str]] = {}

    def reach(room: str) -> set[str]:
        if room not in reached:
            reached[room] = imports[room].union(*map(reach, imports[room]))
        return reached[room]

    return {
        room: {name for name in names if not any(name in reach(other) for other in names)}
        for room, names in imports.items()
    }


def picture() -> str:
    """The SVG: floors from top to bottom in the order of the data, a floor's boxes side by side."""
    floors = import_order()
    centers = {
        room: (_WIDTH * (column + 0.5) / len(floor), _MARGIN + _FLOOR_HEIGHT * level)
        for level, floor in enumerate(floors)
        for column, room in enumerate(floor)
    }
    parts = [_HEAD.format(width=_WIDTH, height=_FLOOR_HEIGHT * len(floors))]
    for room, names in sorted(needed(room_imports()).items()):
        parts += [_line(centers[name], centers[room]) for name in sorted(names)]
    parts += [_box(room, *center) for room, center in centers.items()]
    return "".join([*parts, "</svg>\n"])


def _line(lower: tuple[float, float], upper: tuple[float, float]) -> str:
    """A curve from the bottom of the imported room to the top of the importing one."""
    (x0, y0), (x1, y1) = lower, upper
    y0 += _BOX_HEIGHT
    bend = (y1 - y0) / 2
    return (
        f'<path d="M{x0:.0f} {y0:.0f} C{x0:.0f} {y0 + bend:.0f} {x1:.0f} {y1 - bend:.0f} '
        f'{x1:.0f} {y1:.0f}" fill="none" stroke="#90a4ae" stroke-width="1.2"/>\n'
    )


def _box(room: str, x: float, y: float) -> str:
    folder = PACKAGE / room
    num_files = len(list(folder.rglob("*.py"))) - len(list(folder.rglob("__init__.py")))
    below = f"{num_files} files" if folder.is_dir() else "one file"
    fill = "#e3eef3" if folder.is_dir() else "#fdf3dc"
    return (
        f'<rect x="{x - _BOX_WIDTH / 2:.0f}" y="{y:.0f}" width="{_BOX_WIDTH}" '
        f'height="{_BOX_HEIGHT}" rx="6" fill="{fill}" stroke="#546e7a"/>\n'
        f'<text x="{x:.0f}" y="{y + 20:.0f}" font-size="15" fill="#102027">'
        f"{html.escape(room)}</text>\n"
        f'<text x="{x:.0f}" y="{y + 37:.0f}" font-size="11" fill="#546e7a">{below}</text>\n'
    )


if __name__ == "__main__":
    main()
