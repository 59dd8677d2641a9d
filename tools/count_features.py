"""Count what the row features cost the rest of the package: branches, files, lines, options, keys.

    python tools/count_features.py

A feature is a way to make rows or orders beside packing whole samples for Megatron's schedules. A
branch is a condition (if, while, assert, comprehension) that names a feature outside of the
feature's own modules. The names are matched, not understood: the numbers are for comparing two
versions, not for their own sake.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import sys
import typing
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megapack.cli import COMMANDS  # noqa: E402
from megapack.config.sections import TrainConfig  # noqa: E402


class Feature(NamedTuple):
    """A feature, by the names that conditions have for it."""

    names: str
    own: str
    """Beginnings of the paths of its own modules, in the package."""


FEATURES = {
    "shared prefixes": Feature(
        "prefixes prefix_table share_prefixes shares_prefixes shared_tokens shared_fraction "
        "num_shared families",
        "prefixes/ planner/families planner/sharing",
    ),
    "wide rows": Feature(
        "context_parallel dp_ranks width widths wide is_wide wide_rows num_wide_rows widest "
        "wide_fraction shares_rows",
        "planner/wide planner/fill planner/annealing schedule/row_groups",
    ),
    "pieces": Feature(
        "piece pieces split_samples chain chains link carried has_piece num_pieces "
        "piece_fraction num_carried earlier cuts",
        "planner/pieces rows/chain model/carried model/experts/chains schedule/chains",
    ),
    "orders": Feature(
        "orders has_orders is_ordered backward has_weights num_split_backwards executor "
        "num_ordered_steps",
        "plan/order plan/executor planner/operations planner/own_orders planner/clock "
        "schedule/operations schedule/channels model/weight_gradients",
    ),
}


def conditions(tree: ast.AST) -> Iterator[ast.expr]:
    """The conditions of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
            yield node.test
        elif isinstance(node, ast.comprehension):
            yield from node.ifs


def names_of(node: ast.expr) -> set[str]:
    """Names and attributes of an expression."""
    found = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            found.add(part.id)
        elif isinstance(part, ast.Attribute):
            found.add(part.attr)
    return found


def feature_branches(package: Path) -> dict[str, Counter[str]]:
    """Per feature the number of branches in each file that is not its own."""
    found: dict[str, Counter[str]] = {name: Counter() for name in FEATURES}
    for path in sorted(package.rglob("*.py")):
        module = path.relative_to(package).as_posix()
        used = [names_of(node) for node in conditions(ast.parse(path.read_text("utf-8")))]
        for name, feature in FEATURES.items():
            if not module.startswith(tuple(feature.own.split())):
                wanted = set(feature.names.split())
                found[name][module] += sum(bool(names & wanted) for names in used)
    return {name: Counter({m: n for m, n in own.items() if n}) for name, own in found.items()}


def num_lines(*paths: Path) -> int:
    """Lines of Python files, those of folders included."""
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py"))]
    return sum(len(file.read_text("utf-8").splitlines()) for file in files)


def num_options() -> int:
    """Options of all commands."""
    count = 0
    for name in COMMANDS:
        parser = argparse.ArgumentParser(add_help=False)
        importlib.import_module(f"megapack.commands.{name.replace('-', '_')}").add_arguments(parser)
        count += sum(bool(action.option_strings) for action in parser._actions)
    return count


def num_keys() -> int:
    """Keys of the configuration."""
    hints = typing.get_type_hints(TrainConfig)
    sections = [hint for hint in hints.values() if dataclasses.is_dataclass(hint)]
    return sum(len(dataclasses.fields(section)) for section in sections)


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    package = ROOT / "megapack"
    branches = feature_branches(package)
    files: Counter[str] = Counter()
    for name, own in branches.items():
        print(f"{name}: {sum(own.values())} branches in {len(own)} files of others")
        files.update(own.keys())
    several = sorted(file for file, count in files.items() if count >= 3)
    total = sum(sum(own.values()) for own in branches.values())
    print(f"together: {total} branches in {len(files)} files")
    print(f"files that know three or four features: {len(several)} ({', '.join(several)})")
    planner = num_lines(package / "planner", package / "dp_schedule.py")
    print(f"lines: {num_lines(package)} in the package, {planner} in planner and dp_schedule")
    print(f"interface: {num_options()} options, {num_keys()} keys of the configuration")


if __name__ == "__main__":
    main()
