"""Count what features cost the rest of the package: branches, files, lines, options, keys.

    python tools/count_features.py

A row feature is a way to make rows or orders beside packing whole samples for Megatron's schedules.
Other features cut across rooms too, and so does each option of a model: a file knows an option if
its code has the option's name. A branch is a condition (if, while, assert, comprehension) that
names a feature outside of its own modules. The names are matched, not understood: the numbers
are for comparing two versions, not for their own sake.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import statistics
import sys
import typing
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megapack.cli import COMMANDS  # noqa: E402
from megapack.commands.parser import Parser  # noqa: E402
from megapack.job.config.sections import ModelConfig, TrainConfig  # noqa: E402
from tools.code_lines import by_room, code_lines  # noqa: E402


class Feature(NamedTuple):
    """A feature, by the names that conditions have for it."""

    names: str
    own: str
    """Beginnings of the paths of its own modules, in the package."""


ROW_FEATURES = {
    "shared prefixes": Feature(
        "prefixes prefix_table share_prefixes shares_prefixes shared_tokens shared_fraction "
        "families sequences",
        "prefixes/ planner/families plan/checks/prefixes",
    ),
    "wide rows": Feature(
        "context_parallel dp_ranks width widths wide is_wide wide_rows num_wide_rows widest "
        "wide_fraction shares_rows",
        "planner/wide planner/fill plan/checks/wide schedule/row_groups",
    ),
    "pieces": Feature(
        "piece pieces split_samples chain chains link carried has_piece num_pieces "
        "piece_fraction num_carried earlier cuts",
        "planner/pieces planner/cuts plan/checks/pieces rows/chain model/carried "
        "model/experts/chains schedule/chains",
    ),
    "orders": Feature(
        "orders has_orders is_ordered backward has_weights num_split_backwards executor "
        "num_ordered_steps",
        "plan/order plan/executor plan/checks/orders planner/orders planner/clock "
        "schedule/operations schedule/channels model/weight_gradients",
    ),
}

OTHER_FEATURES = {
    "out of memory": Feature(
        "on_oom retries_oom out_of_memory OutOfMemoryError StepOutOfMemory num_oom_replans", ""
    ),
    "row lengths": Feature(
        "row_shapes row_shape round_row_tokens row_lengths",
        "",
    ),
    "critics": Feature("critic has_critic value_head Critic reference_value", "job/train/critic"),
    "calibration": Feature(
        "calibrate calibrator calibration fits online",
        "cost/online cost/calibration job/train/calibrator",
    ),
    "multi-token prediction": Feature(
        "mtp mtp_num_layers num_mtp_layers mtp_loss_coef", "model/mtp"
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


def feature_branches(package: Path, features: Mapping[str, Feature]) -> dict[str, Counter[str]]:
    """Per feature the number of branches in each file that is not its own."""
    found: dict[str, Counter[str]] = {name: Counter() for name in features}
    for path in sorted(package.rglob("*.py")):
        module = path.relative_to(package).as_posix()
        used = [names_of(node) for node in conditions(ast.parse(path.read_text("utf-8")))]
        for name, feature in features.items():
            own = tuple(feature.own.split())
            if not (own and module.startswith(own)):
                wanted = set(feature.names.split())
                found[name][module] += sum(bool(names & wanted) for names in used)
    return {name: Counter({m: n for m, n in own.items() if n}) for name, own in found.items()}


def files_of_options(package: Path) -> dict[str, int]:
    """For each key of `ModelConfig` the number of files whose code has its name; prose that
    mentions it does not count."""
    words = [code_names(ast.parse(path.read_text("utf-8"))) for path in package.rglob("*.py")]
    names = [field.name for field in dataclasses.fields(ModelConfig)]
    return {name: sum(name in own for own in words) for name in names}


def code_names(tree: ast.AST) -> set[str]:
    """Names, attributes, arguments and strings of a module."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                found.add(name)
            case ast.keyword(arg=str(name)) | ast.Constant(value=str(name)):
                found.add(name)
    return found


def num_options() -> int:
    """Options of all commands."""
    count = 0
    for name in COMMANDS:
        parser = Parser(add_help=False)
        importlib.import_module(f"megapack.commands.{name.replace('-', '_')}").add_arguments(parser)
        count += sum(bool(action.option_strings) for action in parser._actions)
    return count


def num_keys() -> int:
    """Keys of the configuration."""
    hints = typing.get_type_hints(TrainConfig)
    sections = [hint for hint in hints.values() if dataclasses.is_dataclass(hint)]
    return sum(len(dataclasses.fields(section)) for section in sections)


def print_branches(package: Path, features: Mapping[str, Feature]) -> Counter[str]:
    """Print the branches of each feature; returns in how many features' counts a file is."""
    files: Counter[str] = Counter()
    total = 0
    for name, own in feature_branches(package, features).items():
        print(f"{name}: {sum(own.values())} branches in {len(own)} files of others")
        files.update(own.keys())
        total += sum(own.values())
    print(f"together: {total} branches in {len(files)} files")
    return files


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    package = ROOT / "megapack"
    files = print_branches(package, ROW_FEATURES)
    several = sorted(file for file, count in files.items() if count >= 3)
    print(f"files that know three or four of them: {len(several)} ({', '.join(several)})\n")
    print_branches(package, OTHER_FEATURES)
    known = Counter(files_of_options(package))
    most = ", ".join(f"{name} {count}" for name, count in known.most_common(8))
    mean = sum(known.values()) / len(known)
    median = statistics.median(known.values())
    print(f"\nkeys of a model: {len(known)}, each in {mean:.1f} files (median {median:g}); {most}")
    rooms = by_room(package)
    planner = rooms["planner"] + code_lines(package / "dp_schedule.py")
    print(f"code lines: {sum(rooms.values())} in the package, {planner} in planner and dp_schedule")
    print(f"interface: {num_options()} options, {num_keys()} keys of the configuration")


if __name__ == "__main__":
    main()
