"""Measure the planner: the quality of its plans beside other strategies, and its milliseconds.

    python tools/bench_planner.py                      # writes all docs/measured/planner_*.md
    python tools/bench_planner.py --only-common        # layouts without interleaving, by host
    python tools/bench_planner.py --only-published     # inputs that others published
    python tools/bench_planner.py --only-costs         # what the cost model's terms change
    python tools/bench_planner.py --only-shapes        # rows of few lengths
    python tools/bench_planner.py --only-steps         # steps of equal work
    python tools/bench_planner.py --only-hybrid        # hybrid models
    python tools/bench_planner.py --only-images        # models with images
    python tools/bench_planner.py --only-bound         # the distance to a lower bound
    python tools/bench_planner.py --only-operations    # split samples and split backwards
    python tools/bench_planner.py --only-dynamic       # rows over several DP ranks
    python tools/bench_planner.py --only-families      # families of shared prefixes in pieces
    python tools/bench_planner.py --only-shared        # shared prefixes
    python tools/bench_planner.py --only-peers         # other strategies, by trace and layout
    python tools/bench_planner.py --only-speed         # planning time, with its picture

Each option writes one file, planner_NAME.md; what it says above its tables is in
`tools/benching/planner_parts.py`. `--traces FOLDER` has the length traces; without them lengths are
generated. `--peer verl` adds the installed package's own partitioner to the peers.

Sources of others, of which tables have their planner or their inputs: `--megatron FOLDER` (the dev
branch of Megatron-LM), `--distca FOLDER` (hao-ai-lab/DistCA) and `--dynapipe FOLDER`
(awslabs/optimizing-multitask-training-through-dynamic-pipelines).

Quality is time over equal work: a step's simulated seconds over the seconds of its samples' work
spread evenly over all GPUs, without a bubble, alignment or fixed costs. No plan can reach 1.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megapack import Layout, Policy, check_plan
from megapack.outlook.baselines import Strategy
from tools.benching.lower_bound import LowerBounds, sample_seconds
from tools.benching.planner_cases import (
    MODELS,
    Case,
    Result,
    cases,
    cost_of,
    judge,
    load,
    mean,
    plan_of,
    run_ours,
    run_strategy,
)
from tools.benching.planner_common import common_table
from tools.benching.planner_costs import costs_table
from tools.benching.planner_families import (
    generated_steps,
    large_steps,
    pieces_table,
    shared_table,
    speed_table,
    trace_steps,
)
from tools.benching.planner_hybrid import hybrid_table
from tools.benching.planner_images import images_table, layouts_table, sent_table
from tools.benching.planner_parts import PARTS
from tools.benching.planner_peer_code import megatron_strategies, verl_strategy
from tools.benching.planner_peers import BASELINES
from tools.benching.planner_published import (
    MILES_LAYOUT,
    documents_table,
    makespan_table,
    nvidia_table,
    slots_table,
)
from tools.benching.planner_shapes import shapes_table
from tools.benching.planner_speed import draw, gain_table, growth_tables, target_table
from tools.benching.planner_steps import Way, steps_tables
from tools.benching.ramp_bound import ramp_bound
from tools.pages import measured

ROOT = Path(__file__).resolve().parents[1]
# Samples per optimizer step.
BATCHES = (512, 1024, 2048)
# The same for rows over several DP ranks: the fewer samples a step has, the more a long one counts.
DYNAMIC_BATCHES = (128, 256, 512)
# Samples of a step of the table of shared prefixes.
SHARED_SAMPLES = 512
# The same for families over the budget.
FAMILY_SAMPLES = 256
# The same for the lower bound.
BOUND_SAMPLES = 512
# Geometric mean of the distance to the bound that is wanted; cells that are further are counted.
WANTED_DISTANCE = 1.03
# Evaluations of a second plan of those: about a hundred times the default.
LONG_SEARCH = 200_000
# The same for hybrid models, and their traces.
HYBRID_SAMPLES = 256
HYBRID_TRACES = ("servegen", "openchat")
# Samples of the table of few row lengths: half of them choose the lengths.
SHAPE_SAMPLES = 1024
# Samples of a step of the tables of split samples and split backwards.
OPERATION_BATCHES = (128, 512)
# Steps of the table of the spread of step times, and samples of each.
SPREAD_STEPS = 200
SPREAD_SAMPLES = 128
# Traces with enough samples for tables of an epoch's steps; the most samples of an epoch.
STEPS_TRACES = ("openchat", "azure", "servegen")
STEPS_SAMPLES = 64 * 128
STEPS_LAYOUTS = ("dp8", "dp4 pp4")
PICTURE = ROOT / "docs" / "images" / "planner_speed.svg"
SPEED_MARKS = ("<!-- measured: speed -->", "<!-- end: speed -->")
FAMILY_MARKS = ("<!-- measured: families -->", "<!-- end: families -->")
SHARED_MARKS = ("<!-- measured: shared prefixes -->", "<!-- end: shared prefixes -->")
OPERATION_MARKS = ("<!-- measured: operations -->", "<!-- end: operations -->")
BOUND_MARKS = ("<!-- measured: lower bound -->", "<!-- end: lower bound -->")
HYBRID_MARKS = ("<!-- measured: hybrid models -->", "<!-- end: hybrid models -->")
COMMON_MARKS = ("<!-- measured: common layouts -->", "<!-- end: common layouts -->")
PUBLISHED_MARKS = ("<!-- measured: published -->", "<!-- end: published -->")
COST_MARKS = ("<!-- measured: costs -->", "<!-- end: costs -->")
SHAPE_MARKS = ("<!-- measured: row shapes -->", "<!-- end: row shapes -->")
STEPS_MARKS = ("<!-- measured: steps -->", "<!-- end: steps -->")
DYNAMIC_MARKS = ("<!-- measured: dynamic CP -->", "<!-- end: dynamic CP -->")
LAYOUTS = {
    "dp8": Layout(dp=8),
    "dp4 pp4": Layout(dp=4, pp=4),
    "dp4 pp4 vpp2": Layout(dp=4, pp=4, vpp=2),
    "dp2 pp8 vpp4": Layout(dp=2, pp=8, vpp=4),
}
DYNAMIC_LAYOUTS = {
    **LAYOUTS,
    "dp8 pp4": Layout(dp=8, pp=4),
    "dp8 pp4 vpp2": Layout(dp=8, pp=4, vpp=2),
}
OPERATION_LAYOUTS = {
    "dp4 pp4": Layout(dp=4, pp=4),
    "dp4 pp4 vpp2": Layout(dp=4, pp=4, vpp=2),
    "dp2 pp8": Layout(dp=2, pp=8),
    "dp8 pp4": Layout(dp=8, pp=4),
}
SPREAD_LAYOUTS = ("dp4 pp4 vpp2", "dp8 pp4")
# Layout and samples of the table of milliseconds of planning rows over several ranks.
DYNAMIC_SPEED = ("dp8 pp4 vpp2", 2048)
DYNAMIC = Policy(context_parallel="dynamic")
# Columns of the tables of split samples and split backwards.
OPERATIONS = {
    "fixed": Policy(),
    "dynamic CP": DYNAMIC,
    "split samples": Policy(split_samples="auto"),
    "split backward": Policy(backward="split"),
    "both": Policy(split_samples="auto", backward="split"),
    "all three": Policy(split_samples="auto", backward="split", context_parallel="dynamic"),
}
# What the tables say more about.
BOTH = "both"
ALL_THREE = "all three"
# Beside them: the bound of plans with every freedom, and how far `ALL_THREE` is from it.
BOUND = "bound"
DISTANCE = "distance"


def quality(data: dict[str, tuple[np.ndarray, int]], peers: dict[str, Strategy]) -> list[str]:
    """The lines of the table, one per case, and its summary."""
    strategies = {**BASELINES, **peers}
    ours: dict[str, Callable[[Case], Result]] = {
        "search=0": lambda case: run_ours(case, Policy(search=0)),
        "megapack": lambda case: run_ours(case, Policy()),
    }
    names = [*strategies, *ours]
    lines = [f"| data | layout | model | {' | '.join(names)} | M | over | ms |"]
    lines.append("|---" * (len(names) + 6) + "|")
    results: list[tuple[Case, dict[str, Result]]] = []
    for case in list(cases(data, LAYOUTS))[: len(LAYOUTS) * len(MODELS)]:
        # Compile the kernels first, so that no milliseconds contain it.
        run_ours(case, Policy())
    for case in cases(data, LAYOUTS):
        row = {name: run_strategy(case, strategy) for name, strategy in strategies.items()}
        row |= {name: run(case) for name, run in ours.items()}
        results.append((case, row))
        planned = row["megapack"]
        cells = " | ".join(
            f"{row[name].ratio:.3f}{'*' * bool(row[name].num_over)}" for name in names
        )
        lines.append(
            f"| {case.data} | {case.layout_name} | {case.model} | {cells} | "
            f"{planned.num_microbatches} | {planned.num_over} | {planned.milliseconds:.0f} |"
        )
    by_layout = {
        name: [row for case, row in results if case.layout_name == name] for name in LAYOUTS
    }
    for layout, rows in (*by_layout.items(), ("", [row for _, row in results])):
        cells = " | ".join(f"**{mean([row[name].ratio for row in rows]):.3f}**" for name in names)
        lines.append(f"| geometric mean | {layout} | | {cells} | | | |")
    return [*lines, "", *summary([row for _, row in results], list(strategies))]


def summary(results: list[dict[str, Result]], strategies: list[str]) -> list[str]:
    """How much faster than the others, and in how many cases a strategy in budget is faster."""

    def percent_below(pick: Callable[[dict[str, Result]], float]) -> float:
        return 100 * (1 - mean([row["megapack"].ratio / pick(row) for row in results]))

    def best(row: dict[str, Result], in_budget: bool) -> float:
        return min(row[s].ratio for s in strategies if not (in_budget and row[s].num_over))

    slower = sum(row["megapack"].ratio > best(row, True) * (1 + 1e-9) for row in results)
    worst = max(row[s].worst_row for row in results for s in strategies)
    soft = percent_below(lambda row: best(row, False))
    hard = percent_below(lambda row: best(row, True))
    first = percent_below(lambda row: row["first_fit_flops"].ratio)
    next_ = percent_below(lambda row: row["next_fit"].ratio)
    return [
        f"- below the best strategy of each cell, soft budgets included: {soft:.1f} %",
        f"- below the best strategy of each cell that holds the budget: {hard:.1f} %",
        f"- below first_fit_flops: {first:.1f} %, below next_fit: {next_:.1f} %",
        f"- cells where a strategy that holds the budget is faster: {slower} of {len(results)}",
        f"- rows over the budget: megapack {sum(row['megapack'].num_over for row in results)}; "
        f"the longest row of the others is {worst:.2f} times the budget (marked *)",
    ]


def bound(data: dict[str, tuple[np.ndarray, int]]) -> list[str]:
    """The lines of the table of the lower bound, one per case, and the mean distance to it."""
    lines = ["| data | layout | model | megapack | M | lower bound | M | distance |"]
    lines.append("|---" * 8 + "|")
    longer = ["| data | layout | model | megapack | more search | lower bound | distance |"]
    longer.append("|---" * 7 + "|")
    bounds: dict[str, LowerBounds] = {}
    by_layout: dict[str, list[float]] = {}
    for case in cases(data, LAYOUTS):
        planned = run_ours(case, Policy())
        if case.layout_name not in bounds:
            bounds[case.layout_name] = LowerBounds(case.layout, case.cost)
        least = bounds[case.layout_name].of(
            sample_seconds(case.lengths, case.layout, case.cost),
            _least_count(case),
            beat=planned.ratio * case.equal_seconds,
        )
        ratio = least.seconds / case.equal_seconds
        by_layout.setdefault(case.layout_name, []).append(planned.ratio / ratio)
        lines.append(
            f"| {case.data} | {case.layout_name} | {case.model} | {planned.ratio:.3f} | "
            f"{planned.num_microbatches} | {ratio:.3f} | {least.num_microbatches} | "
            f"{planned.ratio / ratio:.3f} |"
        )
        if planned.ratio / ratio > WANTED_DISTANCE:
            more = run_ours(case, Policy(search=LONG_SEARCH)).ratio
            longer.append(
                f"| {case.data} | {case.layout_name} | {case.model} | {planned.ratio:.3f} | "
                f"{more:.3f} | {ratio:.3f} | {more / ratio:.3f} |"
            )
    for layout, distances in by_layout.items():
        lines.append(f"| geometric mean | {layout} | | | | | | **{mean(distances):.3f}** |")
    distances = [distance for own in by_layout.values() for distance in own]
    lines.append(f"| geometric mean | | | | | | | **{mean(distances):.3f}** |")
    far = sum(distance > WANTED_DISTANCE for distance in distances)
    counted = f"- cells further than {WANTED_DISTANCE} from the bound: {far} of {len(distances)}"
    return [*lines, "", counted, "", f"With `search: {LONG_SEARCH}`:", "", *longer]


def speed() -> list[str]:
    """The tables of CPU milliseconds per plan, and their picture."""
    growth, points = growth_tables()
    draw(points, PICTURE)
    compiling = first_call(cached=False)
    cached = first_call(cached=True)
    return [
        *target_table(),
        "",
        f"First plan of a process: {compiling:.1f} s to compile, {cached:.2f} s from the cache.",
        "",
        f"![CPU milliseconds of a plan by number of samples](../images/{PICTURE.name})",
        "",
        *growth,
        "",
        "Simulated seconds of a step:",
        "",
        *gain_table(),
    ]


def shared(traces: Path) -> list[str]:
    """The tables of steps whose samples share prefixes."""
    costs = {
        name: {model: cost_of(layout, model) for model in MODELS}
        for name, layout in LAYOUTS.items()
    }
    steps = [*generated_steps(SHARED_SAMPLES), *trace_steps(traces, SHARED_SAMPLES)]
    # Compile the kernels first, so that no milliseconds contain it.
    shared_table(steps[:1], LAYOUTS, costs)
    lines = shared_table(steps, LAYOUTS, costs)
    large = Layout(dp=1024, pp=8, vpp=2)
    return [*lines, "", *speed_table(1_000_000, large, cost_of(large, "30B-A3B"), rounds=5)]


def families() -> list[str]:
    """The table of families in pieces."""
    layouts = {name: LAYOUTS[name] for name in ("dp8", "dp4 pp4", "dp4 pp4 vpp2")}
    layouts["dp2 pp8"] = Layout(dp=2, pp=8)
    costs = {name: cost_of(layout, "7B") for name, layout in layouts.items()}
    steps = large_steps(FAMILY_SAMPLES)
    # Compile the kernels first, so that no milliseconds contain it.
    pieces_table(steps[:1], layouts, costs)
    return pieces_table(steps, layouts, costs)


def operations(traces: Path) -> list[str]:
    """The tables of split samples and split backwards."""
    lines = []
    for batch in OPERATION_BATCHES:
        lines += [f"## Steps of up to {batch} samples", ""]
        lines += [*operation_quality(load(traces, batch)), ""]
    layout, samples = DYNAMIC_SPEED
    title = f"## CPU milliseconds of planning {samples} samples on {layout}"
    return [*lines, title, "", *plan_speed(load(traces, samples), layout, OPERATIONS)]


def operation_quality(data: dict[str, tuple[np.ndarray, int]]) -> list[str]:
    """The lines of one table, one per case, and the geometric means of each layout."""
    names = list(OPERATIONS)
    columns = [*names, BOUND, DISTANCE, "M", "pieces", "live", "CPU ms"]
    lines = [f"| data | layout | model | {' | '.join(columns)} |"]
    lines.append("|---" * (len(columns) + 3) + "|")
    by_layout: dict[str, list[dict[str, float]]] = {}
    slower = 0
    for case in cases(data, OPERATION_LAYOUTS):
        # Kernels are compiled at the first plan, so that no milliseconds contain it.
        plan_of(case, OPERATIONS[BOTH])
        row = {}
        for name, policy in OPERATIONS.items():
            start = time.process_time()
            plan = plan_of(case, policy)
            seconds = time.process_time() - start
            check_plan(plan, case.lengths)
            row[name] = judge(case, plan.steps[0], seconds)
        ratios = {name: result.ratio for name, result in row.items()}
        slower += any(ratio > ratios["fixed"] * (1 + 1e-9) for ratio in ratios.values())
        ratios[BOUND] = _ramp_ratio(case)
        ratios[DISTANCE] = ratios[ALL_THREE] / ratios[BOUND]
        by_layout.setdefault(case.layout_name, []).append(ratios)
        cells = " | ".join(f"{ratio:.3f}" for ratio in ratios.values())
        best = row[BOTH]
        live = best.live_tokens / row["fixed"].live_tokens
        lines.append(
            f"| {case.data} | {case.layout_name} | {case.model} | {cells} | "
            f"{best.num_microbatches} | {best.num_pieces} | {live:.2f} | {best.milliseconds:.0f} |"
        )
    for layout, rows in by_layout.items():
        means = (mean([row[name] for row in rows]) for name in (*names, BOUND, DISTANCE))
        cells = " | ".join(f"**{value:.3f}**" for value in means)
        lines.append(f"| geometric mean | {layout} | | {cells} | | | | |")
    num_cells = sum(map(len, by_layout.values()))
    return [*lines, "", f"- cells where a plan is slower than fixed: {slower} of {num_cells}"]


def _ramp_ratio(case: Case) -> float:
    """The bound of plans with every freedom, over equal work."""
    seconds = sample_seconds(case.lengths, case.layout, case.cost)
    return ramp_bound(seconds, case.layout, case.cost, _least_count(case)) / case.equal_seconds


def _least_count(case: Case) -> int:
    """The fewest micro-batches of a rank, by the budget."""
    return -(-int(case.lengths.sum()) // (case.budget * case.layout.dp))


def dynamic(traces: Path) -> list[str]:
    """The tables of rows over several DP ranks."""
    lines = []
    for batch in DYNAMIC_BATCHES:
        lines += [f"## Steps of up to {batch} samples", ""]
        lines += [*dynamic_quality(load(traces, batch)), ""]
    lines += ["## Spread of step times", "", *spread(load(traces, 10**9)), ""]
    layout, samples = DYNAMIC_SPEED
    title = f"## CPU milliseconds of planning {samples} samples on {layout}"
    policies = {"fixed": Policy(), "dynamic CP": DYNAMIC}
    return [*lines, title, "", *plan_speed(load(traces, samples), layout, policies)]


def dynamic_quality(data: dict[str, tuple[np.ndarray, int]]) -> list[str]:
    """The lines of one table, one per case, and the geometric means of each layout."""
    names = [*BASELINES, "fixed", "dynamic CP"]
    lines = [f"| data | layout | model | {' | '.join(names)} | M | wide rows |"]
    lines.append("|---" * (len(names) + 5) + "|")
    by_layout: dict[str, list[dict[str, float]]] = {}
    slower = 0
    for case in cases(data, DYNAMIC_LAYOUTS):
        row = {name: run_strategy(case, strategy) for name, strategy in BASELINES.items()}
        row |= {"fixed": run_ours(case, Policy()), "dynamic CP": run_ours(case, DYNAMIC)}
        ratios = {name: result.ratio for name, result in row.items()}
        by_layout.setdefault(case.layout_name, []).append(ratios)
        slower += ratios["dynamic CP"] > ratios["fixed"] * (1 + 1e-9)
        cells = " | ".join(
            f"{row[name].ratio:.3f}{'*' * bool(row[name].num_over)}" for name in names
        )
        planned = row["dynamic CP"]
        lines.append(
            f"| {case.data} | {case.layout_name} | {case.model} | {cells} | "
            f"{planned.num_microbatches} | {planned.widths} |"
        )
    for layout, rows in by_layout.items():
        cells = " | ".join(f"**{mean([row[name] for row in rows]):.3f}**" for name in names)
        lines.append(f"| geometric mean | {layout} | | {cells} | | |")
    num_cells = sum(map(len, by_layout.values()))
    return [*lines, "", f"- cells where dynamic CP is slower than fixed: {slower} of {num_cells}"]


def spread(data: dict[str, tuple[np.ndarray, int]]) -> list[str]:
    """The table of the standard deviation of step times over many steps, in percent of the mean.

    Each step's samples are drawn from the trace, so that the work of steps differs, too.
    """
    names = [*BASELINES, "fixed", "dynamic CP"]
    lines = [f"| data | layout | model | equal work | {' | '.join(names)} |"]
    lines.append("|---" * (len(names) + 4) + "|")
    for name, (lengths, budget) in data.items():
        for layout in SPREAD_LAYOUTS:
            rng = np.random.default_rng(0)
            seconds: dict[str, list[float]] = {n: [] for n in ("equal work", *names)}
            for _ in range(SPREAD_STEPS):
                drawn = rng.choice(lengths, SPREAD_SAMPLES)
                sizes = DYNAMIC_LAYOUTS[layout]
                cost = cost_of(sizes, "30B-A3B")
                case = Case(name, drawn, budget, layout, sizes, "30B-A3B", cost)
                results = {n: run_strategy(case, s) for n, s in BASELINES.items()}
                results |= {
                    "fixed": run_ours(case, Policy()),
                    "dynamic CP": run_ours(case, DYNAMIC),
                }
                seconds["equal work"].append(case.equal_seconds)
                for n, result in results.items():
                    seconds[n].append(result.ratio * case.equal_seconds)
            cells = " | ".join(
                f"{100 * statistics.pstdev(s) / statistics.fmean(s):.1f} %"
                for s in seconds.values()
            )
            lines.append(f"| {name} | {layout} | 30B-A3B | {cells} |")
    return lines


def plan_speed(
    data: dict[str, tuple[np.ndarray, int]], layout: str, policies: dict[str, Policy]
) -> list[str]:
    """The table of CPU milliseconds per plan: medians of five."""
    names = " | ".join(policies)
    lines = [f"| data | samples | model | {names} |", "|---" * (3 + len(policies)) + "|"]
    for case in cases(data, {layout: DYNAMIC_LAYOUTS[layout]}):
        medians = []
        for policy in policies.values():
            times = []
            for _ in range(5):
                start = time.process_time()
                plan_of(case, policy)
                times.append(1e3 * (time.process_time() - start))
            medians.append(statistics.median(times))
        cells = " | ".join(f"{ms:.0f}" for ms in medians)
        lines.append(f"| {case.data} | {case.lengths.size} | {case.model} | {cells} |")
    return lines


def first_call(cached: bool) -> float:
    """Seconds of a new process's first plan, without the imports."""
    code = (
        "import time, megapack\n"
        "start = time.perf_counter()\n"
        "megapack.build_dp_schedule([5, 6, 7] * 9, layout=megapack.Layout(dp=2, pp=2),\n"
        "    max_tokens_per_gpu=20, cost=megapack.CostModel(fixed=1.0, per_token=1.0))\n"
        "print(time.perf_counter() - start)"
    )
    import tempfile

    with tempfile.TemporaryDirectory() as empty:
        env = dict(os.environ, PYTHONPATH=str(ROOT))
        if not cached:
            env["NUMBA_CACHE_DIR"] = empty
        out = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
    return float(out.stdout)


def machine() -> str:
    """Cores, processor and Python version."""
    model = platform.processor() or "unknown processor"
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else model
    return f"{os.cpu_count()} cores of {model}, Python {platform.python_version()}"


def shapes(traces: Path) -> Iterator[str]:
    """The table of few row lengths."""
    return shapes_table(cases(load(traces, SHAPE_SAMPLES), LAYOUTS))


def common(traces: Path, megatron: Path | None) -> list[str]:
    """The table of layouts without interleaving."""
    return common_table(traces, megatron_strategies(megatron) if megatron else {})


def published(megatron: Path | None, distca: Path | None, dynapipe: Path | None) -> list[str]:
    """The tables of inputs of others; those without their sources are left out."""
    costs = {model: cost_of(MILES_LAYOUT, model) for model in MODELS}
    tables: list[tuple[str, Iterable[str]]] = []
    if megatron:
        tables.append(("Megatron-LM's example of dynamic CP", nvidia_table(megatron)))
    if distca:
        tables.append(("Documents of WLB-LLM and ProLong", documents_table(distca)))
    if dynapipe:
        tables.append(("DynaPipe's spread of micro-batches", makespan_table(dynapipe)))
    tables.append(("Padded slots of miles#1766", slots_table(costs)))
    return [line for title, table in tables for line in (f"## {title}", "", *table, "")]


def steps(traces: Path) -> Iterator[str]:
    """The tables of steps of about equal work."""
    model = "30B-A3B"
    ways = {name: Way(LAYOUTS[name], cost_of(LAYOUTS[name], model)) for name in STEPS_LAYOUTS}
    data = load(traces, STEPS_SAMPLES)
    return steps_tables(
        {name: data[name] for name in STEPS_TRACES if name in data}, ways, MODELS[model]
    )


def hybrid(traces: Path) -> list[str]:
    """The table of hybrid models."""
    data = load(traces, HYBRID_SAMPLES)
    return hybrid_table((name, *data[name]) for name in HYBRID_TRACES if name in data)


def all_qualities(traces: Path, peers: dict[str, Strategy]) -> list[str]:
    """The tables against other strategies."""
    lines = []
    for batch in BATCHES:
        table = quality(load(traces, batch), peers)
        lines += [f"## Steps of up to {batch} samples", "", *table, ""]
    return lines


def write(name: str, options: str, lines: Iterable[str]) -> Path:
    """Write and print a file of tables; `options` are those of its own in the command."""
    body = list(lines)
    print("\n".join(body))
    title, what = PARTS[name]
    what = textwrap.fill(what, 110, break_long_words=False, break_on_hyphens=False)
    command = f"python tools/bench_planner.py --only-{name}{options}"
    return measured.write(f"planner_{name}", title, what, body, machine(), command=command)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, default=ROOT.parent / "shared" / "traces")
    parser.add_argument("--peer", choices=["verl"], action="append", default=[])
    sources = ("megatron", "distca", "dynapipe")
    for name in sources:
        parser.add_argument(f"--{name}", type=Path, metavar="FOLDER")
    for name in PARTS:
        parser.add_argument(f"--only-{name}", action="store_true")
    options = parser.parse_args()
    folders = {name: getattr(options, name) for name in sources}
    tables: dict[str, Callable[[Path], Iterable[str]]] = {
        "common": lambda traces: common(traces, options.megatron),
        "published": lambda _: published(**folders),
        "costs": costs_table,
        "shapes": shapes,
        "steps": steps,
        "hybrid": hybrid,
        "images": lambda _: [*images_table(), "", *sent_table(), "", *layouts_table()],
        "bound": lambda traces: bound(load(traces, BOUND_SAMPLES)),
        "operations": operations,
        "dynamic": dynamic,
        "families": lambda _: families(),
        "shared": shared,
        "peers": lambda traces: all_qualities(
            traces, {name: verl_strategy() for name in options.peer}
        ),
        "speed": lambda _: speed(),
    }
    # What the command of a file has beside its own option.
    given = {name: f" --{name} FOLDER" if folder else "" for name, folder in folders.items()}
    own = {
        "common": given["megatron"],
        "published": "".join(given.values()),
        "peers": "".join(f" --peer {peer}" for peer in options.peer),
    }
    only = [name for name in PARTS if getattr(options, f"only_{name}")]
    for name in only or PARTS:
        write(name, own.get(name, ""), tables[name](options.traces))


if __name__ == "__main__":
    main()
