"""Race plans under seconds that were measured on GPUs, not under the planner's own formula.

    python tools/bench_measured.py --traces FOLDER                # prints the tables, ten minutes
    python tools/bench_measured.py --only "dp8 pp4" --samples 128 # some layouts, one size of steps
    python tools/bench_measured.py --json before.json             # every cell, to compare versions
    python tools/bench_measured.py --write                        # writes its file of docs/measured

A cell is a trace on a layout with a model. Its plans of three policies are made with three cost
models: from the model's sizes, fitted to rows that the judge timed as `tools/calibrate.py` times
them, and counting tokens. The judge (`tools/benching/measured_seconds.py`) gives their seconds, and
those of other schedulers' plans, each with the best of up to five budgets.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megapack import CostModel, Layout, StepPlan, build_dp_schedule
from megapack.cost.assumed import GpuSpeed, cost_from_sizes
from megapack.cost.fit import Measurement
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
from tools.benching.planner_peers import BASELINES, Strategy

LAYOUTS = {
    "dp8": Layout(dp=8),
    "dp4 pp4": Layout(dp=4, pp=4),
    "dp4 pp4 vpp2": Layout(dp=4, pp=4, vpp=2),
    "dp8 pp4": Layout(dp=8, pp=4),
    "dp8 pp4 vpp2": Layout(dp=8, pp=4, vpp=2),
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
            cell[f"peer, {name}"] = min(seconds)
    return cell


def _holds(step: StepPlan, case: Case) -> bool:
    """Whether no row is over the budget, but for a sample alone."""
    most = max(case.budget, int(case.lengths.max()))
    return all(row.row_tokens <= most * row.width for row in step.microbatches)


def run(args: argparse.Namespace) -> dict[str, Cell]:
    """All cells, by layout, model, samples and trace."""
    peers = dict(BASELINES)
    if args.megatron:
        peers |= megatron_strategies(args.megatron)
    cells: dict[str, Cell] = {}
    for samples in args.samples:
        data = load(args.traces, samples)
        for layout_name, layout in LAYOUTS.items():
            if args.only not in layout_name:
                continue
            for model in args.models:
                for trace, (lengths, budget) in data.items():
                    name = f"{layout_name}, {model}, {samples} samples, {trace}"
                    sizes = MODELS[model]
                    cost = cost_from_sizes(
                        sizes,
                        layout,
                        GpuSpeed.of("cuda", "bf16"),
                        mean_length=float(lengths.mean()),
                        stage_layers=split_layers(sizes, layout),
                        recompute="none",
                    )
                    case = Case(trace, lengths, budget, layout_name, layout, model, cost)
                    judge = MeasuredSeconds(sizes, layout, lengths, args.host_ms / 1e3, args.noise)
                    start = time.process_time()
                    cells[name] = race(case, judge, peers)
                    spent = time.process_time() - start
                    print(f"{name}: {spent:.1f} s", file=sys.stderr, flush=True)
    return cells


def tables(cells: Mapping[str, Cell]) -> Iterator[str]:
    """The lines of the tables: ours against the best peer, and our freedoms against each other."""
    layouts = list(dict.fromkeys(name.split(",")[0] for name in cells))
    yield "Ours over the best peer: geometric mean, and the worst cell."
    yield ""
    yield f"| layout | cost model | {' | '.join(OURS)} |"
    yield "|---" * (2 + len(OURS)) + "|"
    for layout in (*layouts, "all"):
        own = [cell for name, cell in cells.items() if layout in ("all", name.split(",")[0])]
        for cost in COSTS:
            texts = []
            for policy in OURS:
                ratios = [cell[f"{cost}, {policy}"] / best_peer(cell) for cell in own]
                texts.append(f"{mean(ratios):.3f}, {max(ratios):.3f}")
            yield f"| {layout} | {cost} | {' | '.join(texts)} |"
    yield ""
    yield "Our freedoms: geometric mean, the worst cell, and cells where the richer plan is slower."
    yield ""
    pairs = [f"{rich} / {poor}" for rich, poor in FREEDOMS]
    yield f"| layout | cost model | {' | '.join(pairs)} |"
    yield "|---" * (2 + len(FREEDOMS)) + "|"
    for layout in (*layouts, "all"):
        own = [cell for name, cell in cells.items() if layout in ("all", name.split(",")[0])]
        for cost in COSTS:
            texts = []
            for rich, poor in FREEDOMS:
                ratios = [cell[f"{cost}, {rich}"] / cell[f"{cost}, {poor}"] for cell in own]
                slower = sum(ratio > ROUNDING for ratio in ratios)
                texts.append(f"{mean(ratios):.3f}, {max(ratios):.3f}, {slower} of {len(ratios)}")
            yield f"| {layout} | {cost} | {' | '.join(texts)} |"


def best_peer(cell: Cell) -> float:
    """Seconds of the fastest of the other schedulers' plans."""
    return min(seconds for name, seconds in cell.items() if name.startswith("peer"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--traces", type=Path, default=Path("shared/traces"))
    parser.add_argument("--samples", type=int, nargs="+", default=SAMPLES)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--only", default="", help="layouts whose name contains this text")
    parser.add_argument("--megatron", type=Path, help="sources of Megatron-LM's dev branch")
    parser.add_argument("--noise", type=float, default=0.0, help="of each row's seconds, a part")
    parser.add_argument(
        "--host-ms", type=float, default=1e3 * HOST_SECONDS, help="host time of a layer's forward"
    )
    parser.add_argument("--json", type=Path, help="write every cell to this file")
    parser.add_argument("--write", action="store_true", help="write its file of docs/measured")
    args = parser.parse_args()
    cells = run(args)
    lines = list(tables(cells))
    print("\n".join(lines))
    if args.json:
        args.json.write_text(json.dumps(cells, indent=0), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
