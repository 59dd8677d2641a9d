"""Race plans under seconds that were measured on GPUs, not under the planner's own formula.

    python tools/bench_measured.py --traces FOLDER   # prints the tables, ten minutes
    python tools/bench_measured.py --only "dp8 pp4" --samples 128
    python tools/bench_measured.py --json before.json
    python tools/bench_measured.py --compare before.json
    python tools/bench_measured.py --write           # writes docs/measured/planner_measured.md

A cell is a trace on a layout with a model. Its plans of three policies are made with three cost
models: from the model's sizes, fitted to rows that the judge timed as `tools/calibrate.py` times
them, and counting tokens. The judge (`tools/benching/measured_seconds.py`) gives their seconds, and
those of other schedulers' plans, each with the best of up to five budgets.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megapack import CostModel, Layout, StepPlan, build_dp_schedule
from megapack.cost.assumed import GpuSpeed, cost_from_sizes
from megapack.cost.fit import Measurement
from megapack.outlook.baselines import Strategy
from tools.benching.calibration_rows import (
    fit_whole_model,
    grid,
    on_one_rank,
    stage_weights,
    total_seconds,
    worth_sharing,
)
from tools.benching.measured_seconds import (
    HOST_SECONDS,
    MeasuredSeconds,
    split_layers,
    step_seconds,
)
from tools.benching.planner_cases import OURS, Case, as_step, load, mean
from tools.benching.planner_costs import MODELS
from tools.benching.planner_peer_code import megatron_strategies
from tools.benching.planner_peers import BASELINES
from tools.pages import measured

LAYOUTS = {
    "dp8": Layout(dp=8),
    "dp4 pp4": Layout(dp=4, pp=4),
    "dp4 pp4 vpp2": Layout(dp=4, pp=4, vpp=2),
    "dp8 pp4": Layout(dp=8, pp=4),
    "dp8 pp4 vpp2": Layout(dp=8, pp=4, vpp=2),
    "dp8 ep8": Layout(dp=8, ep=8),
    "dp16 tp4 pp4": Layout(dp=16, tp=4, pp=4),
    "dp64 tp8": Layout(dp=64, tp=8),
}
SAMPLES = (128, 512)
COSTS = ("sizes", "fitted", "tokens")
DEFAULT, DYNAMIC, EVERYTHING = OURS
# Of a cell, the richer plan and the poorer one.
FREEDOMS = ((EVERYTHING, DYNAMIC), (EVERYTHING, DEFAULT), (DYNAMIC, DEFAULT))
# Peers' budgets over the cell's; none is below the longest sample.
SHARES = (0, 1 / 4, 1 / 2, 3 / 4, 1)
# A richer plan is slower if it takes longer than rounding explains.
ROUNDING = 1 + 1e-9

ROOT = Path(__file__).resolve().parents[1]
# The fastest of the others' plans; of those without rows over several ranks, which our default
# policy has neither.
PEER, FIXED_PEER, DYNAMIC_PEER = "peer", "fixed peer", "peer, default_dynamic_cp"
TITLE = "Plans under measured seconds"
WHAT = """Seconds of plans by tables of what attention, matrices and exchanges took on H100s and an
H200 (`tools/benching/measured_tables.py`), not by the cost model that planned them. Cells are five
traces, steps of 128 and 512 samples, Qwen3-8B and Qwen3-30B-A3B; with `ep8` the latter alone.
`sizes`: planned with the cost model from sizes; `fitted`: with one fitted to the judge's seconds of
the rows that `tools/calibrate.py` times; `tokens`: without one. `megapack` is the default policy,
`dynamic CP` is `context_parallel: dynamic`, and `everything` adds `split_samples: auto` and
`backward: split`. The others are those of `megapack/outlook/baselines.py` and Megatron's dev
branch, each with the best of up to five budgets; `megapack` is compared with those of them that
have no rows over several ranks. A column has the geometric mean, the largest ratio
and the number of cells above 1."""

Cell = dict[str, float]
"""Seconds of a cell's plans: "sizes, everything", and "peer, next_fit"."""


def fitted_cost(judge: MeasuredSeconds, budget: int) -> CostModel:
    """The cost model of the judge's layout, fitted to the rows that `tools/calibrate.py` times."""
    layout, sizes = judge.layout, judge.sizes
    alone = replace(layout, pp=1, vpp=1)
    whole = replace(judge, layout=alone)
    rows = grid(budget, budget, alone.over(layout.dp).row_alignment)
    timed = [
        _timed(whole, row, width)
        for width in layout.widths
        for row in (rows if width == 1 else worth_sharing(rows, budget))
    ]
    cost = fit_whole_model(timed, layout)
    if layout.num_chunks == 1:
        return cost
    few = sizes.num_layers // layout.num_chunks
    fewer = replace(whole, sizes=replace(sizes, num_layers=few))
    weights = stage_weights(
        sum(map(total_seconds, on_one_rank(timed))),
        sum(total_seconds(_timed(fewer, row, 1)) for row in rows),
        num_few=few,
        stage_layers=split_layers(sizes, layout),
    )
    return replace(cost, stage_weights=weights)


def _timed(judge: MeasuredSeconds, row: Sequence[int], width: int) -> Measurement:
    lengths = np.array(row)
    spans = np.stack([np.zeros_like(lengths), lengths], axis=1)
    seconds = judge.seconds(int(lengths.sum()), spans, width)
    return Measurement(
        row_tokens=int(lengths.sum()),
        tokens_sq=int((lengths**2).sum()),
        num_samples=lengths.size,
        forward_seconds=float(seconds.forward[0]),
        backward_seconds=float(seconds.backward[0]),
        width=width,
        weight_seconds=float(seconds.weights[0]),
    )


def race(case: Case, judge: MeasuredSeconds, peers: Mapping[str, Strategy]) -> Cell:
    """Seconds of each plan of a case, by the judge."""
    # What machines do in a run, nobody knows when the cost model is fitted.
    costs = {
        "sizes": case.cost,
        "fitted": fitted_cost(replace(judge, noise=0.0), case.budget),
        "tokens": None,
    }
    cell = {}
    for cost_name, cost in costs.items():
        for name, policy in OURS.items():
            plan = build_dp_schedule(
                case.lengths,
                layout=case.layout,
                max_tokens_per_gpu=case.budget,
                cost=cost,
                policy=policy,
            )
            cell[f"{cost_name}, {name}"] = step_seconds(plan.steps[0], judge)
    longest = int(case.lengths.max())
    budgets = {max(longest, int(share * case.budget)) for share in SHARES}
    for name, strategy in peers.items():
        steps = [
            as_step(case, strategy(case.lengths, case.work, case.layout, budget))
            for budget in sorted(budgets)
        ]
        seconds = [step_seconds(step, judge) for step in steps if _holds(step, case)]
        if seconds:
            cell[f"{PEER}, {name}"] = min(seconds)
    return cell


def _holds(step: StepPlan, case: Case) -> bool:
    """Whether no row is over the budget, but for a sample alone."""
    most = max(case.budget, int(case.lengths.max()))
    return all(row.row_tokens <= most * row.width for row in step.microbatches)


def run(args: argparse.Namespace) -> dict[str, Cell]:
    """All cells, by layout, model, samples and trace."""
    peers = BASELINES | (megatron_strategies(args.megatron) if args.megatron else {})
    names = [
        (layout, model, samples)
        for layout in LAYOUTS
        for model in args.models
        for samples in args.samples
        if args.only in layout and (LAYOUTS[layout].ep == 1 or MODELS[model].num_experts)
    ]
    cells: dict[str, Cell] = {}
    for layout, model, samples in names:
        start = time.process_time()
        for trace, (lengths, budget) in load(args.traces, samples).items():
            sizes, on = MODELS[model], LAYOUTS[layout]
            cost = cost_from_sizes(
                sizes,
                on,
                GpuSpeed.of("cuda", "bf16"),
                mean_length=float(lengths.mean()),
                stage_layers=split_layers(sizes, on),
                recompute="none",
            )
            case = Case(trace, lengths, budget, layout, on, model, cost)
            judge = MeasuredSeconds(sizes, on, lengths, 1e-3 * args.host_ms, args.noise, args.seed)
            cells[f"{layout}, {model}, {samples} samples, {trace}"] = race(case, judge, peers)
        spent = time.process_time() - start
        print(f"{layout}, {model}, {samples} samples: {spent:.0f} s", file=sys.stderr, flush=True)
    return cells


def tables(cells: Mapping[str, Cell]) -> Iterator[str]:
    """The lines of the tables: our plans beside the best peer's, and beside each other."""
    pairs = {policy: (policy, FIXED_PEER if policy == DEFAULT else PEER) for policy in OURS}
    yield "Our plans over the best plan of the others:"
    yield from _table(cells, pairs)
    yield "Our plans over each other:"
    yield from _table(cells, {f"{rich} over {poor}": (rich, poor) for rich, poor in FREEDOMS})


def _table(cells: Mapping[str, Cell], pairs: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    """Ratios by layout and cost model: their geometric mean, the largest, and how many are above 1;
    and the cells with the largest ones."""
    layouts = dict.fromkeys(name.split(",")[0] for name in cells)
    yield from (
        "",
        f"| layout | cost model | {' | '.join(pairs)} |",
        "|---" * (2 + len(pairs)) + "|",
    )
    worst = []
    for layout in (*layouts, "all"):
        for cost in COSTS:
            texts = []
            for title, pair in pairs.items():
                ratios = {
                    name: _seconds(cell, cost, pair[0]) / _seconds(cell, cost, pair[1])
                    for name, cell in cells.items()
                    if layout in ("all", name.split(",")[0])
                }
                name = max(ratios, key=lambda name: ratios[name])
                slower = sum(ratio > ROUNDING for ratio in ratios.values())
                texts.append(f"{mean([*ratios.values()]):.3f}, {ratios[name]:.3f}, {slower}")
                if layout == "all" and slower:
                    worst.append(f"- {cost}, {title}: {ratios[name]:.3f} at {name}")
            yield f"| {layout} | {cost} | {' | '.join(texts)} |"
    yield from ("", *worst, "")


def _seconds(cell: Cell, cost: str, policy: str) -> float:
    """Of a plan of ours, or of the best plan of the others."""
    if policy not in (PEER, FIXED_PEER):
        return cell[f"{cost}, {policy}"]
    peers = [name for name in cell if name.startswith(PEER)]
    return min(cell[name] for name in peers if policy == PEER or name != DYNAMIC_PEER)


def changes(before: Mapping[str, Cell], after: Mapping[str, Cell]) -> Iterator[str]:
    """The lines of a comparison with the cells of another version: seconds after over before."""
    yield from (
        "Seconds after over before:",
        "",
        "| plan | mean | most | at |",
        "|---|---|---|---|",
    )
    for plan in (f"{cost}, {policy}" for cost in COSTS for policy in OURS):
        ratios = {name: cell[plan] / before[name][plan] for name, cell in after.items()}
        worst = max(ratios, key=lambda name: ratios[name])
        yield f"| {plan} | {mean([*ratios.values()]):.3f} | {ratios[worst]:.3f} | {worst} |"


def write(lines: Sequence[str], has_megatron: bool) -> Path:
    """Write docs/measured/planner_measured.md."""
    command = "python tools/bench_measured.py" + " --megatron FOLDER" * has_megatron + " --write"
    what = textwrap.fill(WHAT, 110, break_long_words=False, break_on_hyphens=False)
    versions = measured.versions()
    return measured.write("planner_measured", TITLE, what, lines, versions, command=command)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--traces", type=Path, default=ROOT.parent / "shared" / "traces")
    parser.add_argument("--samples", type=int, nargs="+", default=SAMPLES)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--only", default="", help="layouts whose name contains this text")
    parser.add_argument("--megatron", type=Path, help="sources of Megatron-LM's dev branch")
    parser.add_argument("--noise", type=float, default=0.0, help="of each row's seconds, a part")
    parser.add_argument("--seed", type=int, default=0, help="of the noise")
    parser.add_argument(
        "--host-ms", type=float, default=1e3 * HOST_SECONDS, help="host time of a layer's forward"
    )
    parser.add_argument("--json", type=Path, help="write every cell to this file")
    parser.add_argument("--compare", type=Path, help="such a file of another version")
    parser.add_argument("--write", action="store_true", help="write its file of docs/measured")
    args = parser.parse_args()
    cells = run(args)
    lines = list(tables(cells))
    if args.json:
        args.json.write_text(json.dumps(cells, indent=0), encoding="utf-8")
    if args.write:
        write(lines, bool(args.megatron))
    if args.compare:
        lines += changes(json.loads(args.compare.read_text(encoding="utf-8")), cells)
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
