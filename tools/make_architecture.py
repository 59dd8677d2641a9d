"""Draws docs/images/rooms.svg, the rooms of the package, from the imports of megapack/.

    python tools/make_architecture.py

A box is a room: a folder or a module of megapack/, or of megapack/job. A line is an import between
two of them. Lines that follow from others are left out: `a` imports `c` is not drawn if `a` imports
`b` and `b` imports `c`. The wings and their floors are those of docs/architecture.md; hosts and job
do not import each other and stand side by side.
"""

from __future__ import annotations

import ast
import html
import itertools
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.code_lines import room_of  # noqa: E402

PACKAGE = ROOT / "megapack"
PAGE = ROOT / "docs" / "architecture.md"
PICTURE = ROOT / "docs" / "images" / "rooms.svg"

_WIDTH = 860
_BOX_WIDTH = 124
_BOX_HEIGHT = 46
_TRUNK_WIDTH = 18
_FLOOR_HEIGHT = 92
_MARGIN = 14
# The order within floors settles after about five sweeps; it need not be optimal.
_NUM_SWEEPS = 12
_FILLS = {"core": "#e3eef3", "hosts": "#fbe6d5", "job": "#e4f1e1", "commands": "#ececec"}
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


def wings() -> dict[str, list[list[str]]]:
    """The floors of each wing by the architecture page, lowest first; a floor imports only lower
    ones, of its own wing and of those that it stands on."""
    _, opened, rest = PAGE.read_text(encoding="utf-8").partition("```text\ncore: ")
    block, closed, _ = rest.partition("```")
    if not (opened and closed):
        raise ValueError(f"{PAGE}: no block that begins with 'core: '; write the order there")
    found: dict[str, list[list[str]]] = {}
    for line in f"core: {block}".replace(",\n", ", ").replace(" ->\n", " -> ").splitlines():
        wing, _, floors = line.partition(": ")
        found[wing] = [floor.split(", ") for floor in floors.split(" -> ")]
    return found


def import_order() -> list[list[str]]:
    """The floors of the whole package, lowest first: core, then hosts beside job, then commands."""
    core, hosts, job, commands = wings().values()
    beside = [[*left, *right] for left, right in itertools.zip_longest(hosts, job, fillvalue=[])]
    return [*core, *beside, *commands]


def wing_of() -> dict[str, str]:
    """The wing of each room."""
    return {room: wing for wing, floors in wings().items() for floor in floors for room in floor}


def room_imports() -> dict[str, set[str]]:
    """Per room the rooms that it imports at import time; functions may import more."""
    found: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        room = room_of(".".join(path.relative_to(PACKAGE).with_suffix("").parts))
        if not room.endswith("__"):
            found.setdefault(room, set()).update(_imported(ast.parse(path.read_text())))
    return {room: (names - {room}) & found.keys() for room, names in found.items()}


def _imported(tree: ast.Module) -> set[str]:
    names = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                package, _, below = f"{node.module}.{alias.name}".partition(".")
                names.update([room_of(below)] if package == "megapack" else [])
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


Node = tuple[str, int]
"""A room, and its own floor or a floor that its lines pass through."""


def nodes_and_lines() -> tuple[list[list[Node]], list[tuple[Node, Node]]]:
    """Nodes of each floor, and lines between neighbouring floors.

    A line to a distant floor passes through a node on each floor between. Lines from one room to
    several floors share these nodes, its trunk.
    """
    floors = import_order()
    level = {room: number for number, floor in enumerate(floors) for room in floor}
    nodes = [[(room, number) for room in floor] for number, floor in enumerate(floors)]
    lines: list[tuple[Node, Node]] = []
    for room, importers in sorted(_importers(needed(room_imports())).items()):
        last = max(level[name] for name in importers)
        trunk = [(room, number) for number in range(level[room], last)]
        for node in trunk[1:]:
            nodes[node[1]].append(node)
        lines += itertools.pairwise(trunk)
        lines += [((room, level[name] - 1), (name, level[name])) for name in sorted(importers)]
    return nodes, lines


def _importers(imports: dict[str, set[str]]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for room, names in imports.items():
        for name in names:
            found.setdefault(name, set()).add(room)
    return found


def centers(
    nodes: list[list[Node]], lines: list[tuple[Node, Node]], rooms: set[Node]
) -> dict[Node, float]:
    """The x of each node; a floor's nodes are ordered by the mean x of their neighbours."""
    joined: dict[Node, list[Node]] = {node: [] for floor in nodes for node in floor}
    for upper, lower in lines:
        joined[upper].append(lower)
        joined[lower].append(upper)
    x: dict[Node, float] = {}
    for floor in nodes:
        _spread(floor, rooms, x)
    for sweep in range(_NUM_SWEEPS):
        for floor in nodes if sweep % 2 == 0 else nodes[::-1]:
            means = {
                node: sum(x[other] for other in joined[node]) / max(1, len(joined[node]))
                for node in floor
            }
            _spread(sorted(floor, key=lambda node: (means[node], node)), rooms, x)
    return x


def _spread(floor: list[Node], rooms: set[Node], x: dict[Node, float]) -> None:
    """Place a floor's nodes side by side over the whole width, in this order."""
    widths = [_BOX_WIDTH if node in rooms else _TRUNK_WIDTH for node in floor]
    gap = (_WIDTH - sum(widths)) / (len(floor) + 1)
    left = gap
    for node, width in zip(floor, widths, strict=True):
        x[node] = left + width / 2
        left += width + gap


def picture() -> str:
    """The SVG: floors from top to bottom in the order of the data, a floor's boxes side by side."""
    floors = import_order()
    rooms = {(room, number) for number, floor in enumerate(floors) for room in floor}
    nodes, lines = nodes_and_lines()
    x = centers(nodes, lines, rooms)
    parts = [_HEAD.format(width=_WIDTH, height=_FLOOR_HEIGHT * len(floors))]
    parts += [_line(x[upper], x[lower], lower[1]) for upper, lower in lines]
    trunks = sorted(node for floor in nodes for node in floor if node not in rooms)
    parts += [_trunk(x[node], node[1]) for node in trunks]
    parts += [_box(room, x[room, number], _top(number)) for room, number in sorted(rooms)]
    return "".join([*parts, "</svg>\n"])


def _top(floor: int) -> float:
    return _MARGIN + _FLOOR_HEIGHT * floor


def _line(upper_x: float, lower_x: float, lower_floor: int) -> str:
    """A curve from the bottom of one floor to the top of the next."""
    end = _top(lower_floor)
    begin = _top(lower_floor - 1) + _BOX_HEIGHT
    middle = (begin + end) / 2
    return (
        f'<path d="M{upper_x:.0f} {begin:.0f} C{upper_x:.0f} {middle:.0f} {lower_x:.0f} '
        f'{middle:.0f} {lower_x:.0f} {end:.0f}" fill="none" stroke="#90a4ae"/>\n'
    )


def _trunk(x: float, floor: int) -> str:
    top = _top(floor)
    return f'<path d="M{x:.0f} {top:.0f} v{_BOX_HEIGHT}" fill="none" stroke="#90a4ae"/>\n'


def _box(room: str, x: float, y: float) -> str:
    folder = PACKAGE / room.replace(".", "/")
    num_files = len(list(folder.rglob("*.py"))) - len(list(folder.rglob("__init__.py")))
    below = f"{num_files} files" if folder.is_dir() else "one file"
    fill = _FILLS[wing_of()[room]]
    return (
        f'<rect x="{x - _BOX_WIDTH / 2:.0f}" y="{y:.0f}" width="{_BOX_WIDTH}" '
        f'height="{_BOX_HEIGHT}" rx="6" fill="{fill}" stroke="#546e7a"/>\n'
        f'<text x="{x:.0f}" y="{y + 20:.0f}" font-size="15" fill="#102027">'
        f"{html.escape(room)}</text>\n"
        f'<text x="{x:.0f}" y="{y + 37:.0f}" font-size="11" fill="#546e7a">{below}</text>\n'
    )


if __name__ == "__main__":
    main()
