"""Judge a change of the planner's search: simulated seconds of plans for real lengths, in tables.

    python tools/planner_judge.py write before.json    # 220 plans of the traces, some minutes
    python tools/planner_judge.py write after.json
    python tools/planner_judge.py compare before.json after.json

A table is a policy with its layouts and numbers of samples per step; its cells are all traces and
models of the bench. A part of the search stays if it is worth 1 % in a table's mean
(docs/maintainers/planner.md).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megapack import Layout, Policy, check_plan
from tools.benching.planner_cases import Case, cases, judge, load, mean, plan_of

LAYOUTS = {
    "dp8": Layout(dp=8),
    "dp4 pp4": Layout(dp=4, pp=4),
    "dp4 pp4 vpp2": Layout(dp=4, pp=4, vpp=2),
    "dp2 pp8 vpp4": Layout(dp=2, pp=8, vpp=4),
    "dp8 pp4": Layout(dp=8, pp=4),
    "dp8 ep8": Layout(dp=8, ep=8),
}
FIXED = "fixed"
# Seconds of a cell: one table's plan is slower than another's only by more than rounding in fp64.
ROUNDING = 1e-9

Cells = dict[str, tuple[float, float]]
"""Simulated seconds over equal work, and CPU milliseconds of planning, by the cell's name."""


@dataclass(frozen=True)
class Table:
    """Plans under one policy."""

    policy: Policy
    layouts: tuple[str, ...]
    batches: tuple[int, ...]
    """Samples of a step."""


TABLES = {
    FIXED: Table(Policy(), tuple(LAYOUTS), (128, 512)),
    "dynamic CP": Table(
        Policy(context_parallel="dynamic"), ("dp8", "dp4 pp4", "dp8 pp4"), (128, 512)
    ),
    "pieces, split backward": Table(
        Policy(split_samples="auto", backward="split"), ("dp4 pp4", "dp8 pp4"), (128,)
    ),
    "all": Table(
        Policy(split_samples="auto", backward="split", context_parallel="dynamic"),
        ("dp4 pp4", "dp8 pp4"),
        (128,),
    ),
}


def cells_of(table: Table, traces: Path) -> Iterator[tuple[str, Case]]:
    """The cells of a table with their names."""
    for batch in table.batches:
        layouts = {name: LAYOUTS[name] for name in table.layouts}
        for case in cases(load(traces, batch), layouts):
            yield f"{case.layout_name}, {batch} samples, {case.data}, {case.model}", case


def measure(table: Table, traces: Path) -> Cells:
    """Plan all cells of a table."""
    cells: Cells = {}
    for name, case in cells_of(table, traces):
        if not cells:
            # Compile the kernels first, so that no milliseconds contain it.
            plan_of(case, table.policy)
        start = time.process_time()
        plan = plan_of(case, table.policy)
        result = judge(case, plan.steps[0], time.process_time() - start)
        check_plan(plan, case.lengths)
        cells[name] = result.ratio, result.milliseconds
    return cells


def compare(before: dict[str, Cells], after: dict[str, Cells]) -> Iterator[str]:
    """Lines for each table: its means, by layout too, the worst cell, and those slower than fixed
    rows."""
    for name, cells in after.items():
        old = before[name]
        ratios = {cell: cells[cell][0] / old[cell][0] for cell in cells}
        worst = max(ratios, key=lambda cell: ratios[cell])
        change = _percent(list(ratios.values()))
        yield f"{name}: {change}, worst {_percent([ratios[worst]])} ({worst})"
        groups = dict.fromkeys(_group(cell) for cell in cells)
        for group in groups:
            own = [cell for cell in cells if _group(cell) == group]
            cpu = statistics.median(cells[cell][1] / old[cell][1] for cell in own)
            spent = statistics.median(cells[cell][1] for cell in own)
            yield (
                f"  {group}: {_percent([ratios[cell] for cell in own])}, "
                f"{spent:.1f} ms, x {cpu:.2f}"
            )
        fixed = after.get(FIXED, {})
        slower = [
            cell
            for cell in cells
            if cell in fixed and cells[cell][0] > fixed[cell][0] * (1 + ROUNDING)
        ]
        yield f"  slower than fixed rows: {len(slower)} of {len(cells)} {slower or ''}"


def _group(cell: str) -> str:
    """Layout and number of samples of a cell."""
    return ", ".join(cell.split(", ")[:2])


def _percent(ratios: list[float]) -> str:
    """The geometric mean of ratios, as a change."""
    return f"{100 * (mean(ratios) - 1):+.2f} %"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    write = commands.add_parser("write", help="plan all cells")
    write.add_argument("file", type=Path)
    write.add_argument("--traces", type=Path, default=Path("shared/traces"))
    write.add_argument("--only", default="", help="tables whose name contains this text")
    comparison = commands.add_parser("compare", help="compare two files")
    comparison.add_argument("before", type=Path)
    comparison.add_argument("after", type=Path)
    args = parser.parse_args()
    if args.command == "compare":
        before, after = (json.loads(path.read_text("utf-8")) for path in (args.before, args.after))
        print("\n".join(compare(before, after)))
        return 0
    found = {
        name: measure(table, args.traces) for name, table in TABLES.items() if args.only in name
    }
    args.file.write_text(json.dumps(found, indent=0), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
