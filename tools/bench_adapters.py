"""Write docs/measured/planner_adapters.md: rows of several adapters, and what one per row costs.

python tools/bench_adapters.py --traces FOLDER
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megapack import Layout, Plan, Policy, build_dp_schedule, simulate
from tools.benching.planner_cases import Case, cases, load, mean
from tools.pages.measured import versions, write

SAMPLES = 512
ADAPTERS = (2, 4, 8)
LAYOUTS = {
    "dp8": Layout(dp=8),
    "dp2 pp4": Layout(dp=2, pp=4),
    "dp4 pp4 vpp2": Layout(dp=4, pp=4, vpp=2),
}


def plan_of(case: Case, num_adapters: int, policy: Policy) -> Plan:
    """A plan of samples whose adapters are drawn at random; with 1 they have none."""
    drawn = np.random.default_rng(num_adapters).integers(num_adapters, size=case.lengths.size)
    return build_dp_schedule(
        case.lengths,
        layout=case.layout,
        max_tokens_per_gpu=case.budget,
        cost=case.cost,
        policy=policy,
        adapter_ids=drawn.tolist() if num_adapters > 1 else None,
    )


def seconds(case: Case, plan: Plan) -> float:
    """Simulated seconds of its step."""
    return simulate(plan.steps[0], layout=case.layout, cost=case.cost).makespan


def pure_rows(plan: Plan) -> tuple[int, int]:
    """Rows with samples of one adapter, and all rows."""
    assert plan.adapter_ids is not None
    rows = [{plan.adapter_ids[i] for i in mb.samples} for mb in plan.microbatches if mb.samples]
    return sum(len(row) == 1 for row in rows), len(rows)


def table(traces: Path) -> Iterator[str]:
    """Yield the lines of the table: a row per trace, layout and number of adapters."""
    heads = ("trace", "layout", "adapters", "rows", "of one adapter", "time, group", "time, one")
    yield "| " + " | ".join((*heads, "M, group", "M, one")) + " |"
    yield "|---" * (len(heads) + 2) + "|"
    costs: dict[int, list[float]] = {number: [] for number in ADAPTERS}
    num_pure = 0
    for case in cases(load(traces, SAMPLES), LAYOUTS):
        if case.model != "7B":
            continue
        plain = seconds(case, plan_of(case, 1, Policy()))
        for number in ADAPTERS:
            group, one = (plan_of(case, number, Policy(adapters=kind)) for kind in ("group", "one"))
            pure, rows = pure_rows(group)
            num_pure += pure == rows
            assert len(set(pure_rows(one))) == 1
            costs[number].append(seconds(case, one) / plain)
            yield (
                f"| {case.data} | {case.layout_name} | {number} | {rows} | {pure} "
                f"| {seconds(case, group) / plain:.3f} | {costs[number][-1]:.3f} "
                f"| {group.steps[0].num_microbatches} | {one.steps[0].num_microbatches} |"
            )
    yield ""
    means = ", ".join(f"{mean(own):.3f} with {number}" for number, own in costs.items())
    num_cells = sum(map(len, costs.values()))
    yield (
        f'Geometric means of `time, one`: {means}. Plans under "group" whose rows all hold one '
        f"adapter: {num_pure} of {num_cells}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, default=Path("traces"))
    arguments = parser.parse_args()
    what = (
        f"Steps of {SAMPLES} samples, each of an adapter drawn at random: rows under "
        '`adapters="group"`, how many of them hold one adapter, and simulated seconds over those '
        'of the plan without adapters, under "group" and "one". M is micro-batches per rank. '
        "Model 7B of `tools/benching/planner_cases.py`."
    )
    body = list(table(arguments.traces))
    print("\n".join(body))
    write(
        "planner_adapters",
        "Rows of several adapters",
        what,
        body,
        versions("numpy"),
        command="python tools/bench_adapters.py --traces FOLDER",
    )


if __name__ == "__main__":
    main()
