"""The table of layouts that most users run, without a pipeline or with plain 1F1B, by host.

Each column plans as the host of that name does today; GPUs and samples of a step grow together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from megapack import Layout
from megapack.outlook.baselines import Strategy, budgets
from tools.benching.planner_cases import (
    OURS,
    Case,
    Result,
    cases,
    load,
    mean,
    run_ours,
    run_strategy,
)
from tools.benching.planner_peers import BASELINES

# GPUs of the job -> samples of a step, and layouts.
JOBS: dict[int, tuple[int, dict[str, Layout]]] = {
    8: (
        512,
        {"dp8": Layout(dp=8), "dp8 ep8": Layout(dp=8, ep=8), "dp2 pp4": Layout(dp=2, pp=4)},
    ),
    64: (
        1024,
        {
            "dp8 tp8": Layout(dp=8, tp=8),
            "dp16 tp4 ep8": Layout(dp=16, tp=4, ep=8),
            "dp4 tp4 pp4": Layout(dp=4, tp=4, pp=4),
        },
    ),
    512: (
        2048,
        {
            "dp64 tp8": Layout(dp=64, tp=8),
            "dp16 tp8 pp4": Layout(dp=16, tp=8, pp=4),
            "dp32 tp4 pp4 ep32": Layout(dp=32, tp=4, pp=4, ep=32),
        },
    ),
}
# What hosts do, by the names of `BASELINES` and of `planner_peer_code`; of two ways the better.
HOSTS = {
    "Megatron-LM": ("next_fit",),
    "slime": ("first_fit_flops", "kk_flops"),
    "NeMo-RL": ("mffd",),
    "verl": ("kk_per_rank",),
    "Megatron dev, dp_balanced": ("dp_balanced",),
    "Megatron dev, dynamic CP": ("default_dynamic_cp",),
}


def common_table(traces: Path, peer_code: Mapping[str, Strategy]) -> list[str]:
    """The lines of two tables, with a row per layout: geometric means over the traces and models of
    every scheduler, and of the others with the best budget of five for each trace and model."""
    known = {**BASELINES, **peer_code}
    hosts = {
        host: [known[name] for name in names]
        for host, names in HOSTS.items()
        if known.keys() >= set(names)
    }
    tables = (_Table([*hosts, *OURS]), _Table([*hosts, "megapack"]))
    for num_gpus, (num_samples, layouts) in JOBS.items():
        data = load(traces, num_samples)
        for layout, sizes in layouts.items():
            for case in cases(data, {layout: sizes}):
                ours = {name: run_ours(case, policy) for name, policy in OURS.items()}
                tried = {host: _tried(case, ways) for host, ways in hosts.items()}
                given = {host: found[0] for host, found in tried.items()}
                tuned = {host: min(found, key=_ratio) for host, found in tried.items()}
                tables[0].cells.append({**given, **ours})
                tables[1].cells.append({**tuned, "megapack": ours["megapack"]})
            for table in tables:
                table.end_row(f"{num_gpus} | {layout} | {num_samples}")
    titles = ("## Every scheduler with the same budget", "## Others with the best of five budgets")
    return [
        line
        for title, table in zip(titles, tables, strict=True)
        for line in (title, "", *table.lines())
    ]


def _tried(case: Case, ways: Sequence[Strategy]) -> list[Result]:
    """The fastest of a host's ways under each budget, judged by the case's own, which is first."""
    return [
        min((run_strategy(case, way, budget) for way in ways), key=_ratio)
        for budget in budgets(case.budget, int(case.lengths.max()))
    ]


def _ratio(result: Result) -> float:
    return result.ratio


class _Table:
    """Means of cells by layout, and cells with a row over the budget."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.cells: list[dict[str, Result]] = []
        self.num_cells = 0
        self.overs = dict.fromkeys(names, 0)
        self.rows = [
            f"| GPUs | layout | samples | {' | '.join(names)} |",
            "|---" * (3 + len(names)) + "|",
        ]

    def end_row(self, head: str) -> None:
        """Make the cells since the last row into one."""
        means = (mean([cell[name].ratio for cell in self.cells]) for name in self.names)
        self.rows.append(f"| {head} | {' | '.join(f'{ratio:.3f}' for ratio in means)} |")
        for name in self.names:
            self.overs[name] += sum(bool(cell[name].num_over) for cell in self.cells)
        self.num_cells += len(self.cells)
        self.cells = []

    def lines(self) -> list[str]:
        """The table, and what is over the budget."""
        over = ", ".join(f"{name} {count}" for name, count in self.overs.items() if count)
        note = f"- of {self.num_cells} cells with a row over the budget: {over or 'none'}"
        return [*self.rows, "", note, ""]
