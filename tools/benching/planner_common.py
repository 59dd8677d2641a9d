"""The table of layouts that most users run, without a pipeline or with plain 1F1B, by host.

Each column plans as the host of that name does today; GPUs and samples of a step grow together.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megapack import Layout
from tools.benching.planner_cases import OURS, cases, load, mean, runs_of
from tools.benching.planner_peers import BASELINES, Strategy

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
# What hosts use, by the names of `planner_peers` and of `planner_peer_code`.
HOSTS = {
    "Megatron-LM": "next_fit",
    "slime": "first_fit",
    "NeMo-RL": "mffd",
    "verl": "kk_per_rank",
    "Megatron dev, dp_balanced": "dp_balanced",
    "Megatron dev, dynamic CP": "default_dynamic_cp",
}


def common_table(traces: Path, peer_code: Mapping[str, Strategy]) -> list[str]:
    """The lines of the table: geometric means over the traces and models, a row per layout."""
    known = {**BASELINES, **peer_code}
    runs = runs_of({host: known[name] for host, name in HOSTS.items() if name in known}, OURS)
    lines = [f"| GPUs | layout | samples | {' | '.join(runs)} |", "|---" * (3 + len(runs)) + "|"]
    num_cells, overs = 0, dict.fromkeys(runs, 0)
    for num_gpus, (num_samples, layouts) in JOBS.items():
        data = load(traces, num_samples)
        for layout, sizes in layouts.items():
            ratios: dict[str, list[float]] = {name: [] for name in runs}
            for case in cases(data, {layout: sizes}):
                num_cells += 1
                for name, run in runs.items():
                    result = run(case)
                    ratios[name].append(result.ratio)
                    overs[name] += bool(result.num_over)
            means = " | ".join(f"{mean(own):.3f}" for own in ratios.values())
            lines.append(f"| {num_gpus} | {layout} | {num_samples} | {means} |")
    over = ", ".join(f"{name} {count}" for name, count in overs.items() if count)
    return [*lines, "", f"- of {num_cells} cells with a row over the budget: {over or 'none'}"]
