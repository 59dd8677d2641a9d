"""Predict what the steps of a plan take: the pipeline simulator, no GPU."""

from __future__ import annotations

import argparse
from typing import Any

from megapack.commands.arguments import (
    add_json,
    asked_steps,
    integer,
    print_json,
    print_table,
    span,
)
from megapack.commands.costs import Pricing, add_costs, plan_pricing
from megapack.plan import Plan, StepPlan
from megapack.plan_file import read_plan

_MAX_SHOWN = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """PLAN and a cost model."""
    parser.add_argument("plan", metavar="PLAN", help="a plan.json, or the text of a plan")
    parser.add_argument("--step", type=integer, metavar="S", help="this step only")
    add_json(parser)
    add_costs(parser)


def run(args: argparse.Namespace) -> int:
    """Simulate."""
    plan = read_plan(args.plan)
    numbers = asked_steps(plan, args.step)
    pricing = plan_pricing(args, plan)
    steps = {number: _simulated(plan, plan.steps[number], pricing) for number in numbers}
    if args.json:
        unit = "seconds" if pricing.in_seconds else "tokens"
        print_json({"time_unit": unit, "time_basis": pricing.basis, "steps": steps})
    else:
        _print(steps, pricing)
    return 0


def _simulated(plan: Plan, step: StepPlan, pricing: Pricing) -> dict[str, Any]:
    from megapack.pipeline import simulate_planned

    run = simulate_planned(plan, step, pricing.cost)
    counts = [len(rank) for rank in step.ranks]
    return {
        "num_microbatches": (min(counts), max(counts)),
        "makespan": run.makespan,
        "bubble_fraction": run.bubble_fraction,
        "slowest_rank": max(range(len(counts)), key=run.rank_makespans.__getitem__),
        "rank_makespans": run.rank_makespans,
        "peak_live_tokens": run.peak_live_tokens,
        "peak_in_flight": run.peak_in_flight,
    }


def _print(steps: dict[int, dict[str, Any]], pricing: Pricing) -> None:
    unit = "seconds" if pricing.in_seconds else "token times"
    head = ["step", "M", unit, "bubble", "fastest rank", "slowest rank", "live tokens", "in flight"]
    rows = [head]
    for number, step in list(steps.items())[:_MAX_SHOWN]:
        ends = step["rank_makespans"]
        rows.append(
            [
                str(number),
                span(step["num_microbatches"]),
                f"{step['makespan']:.4g}",
                f"{step['bubble_fraction']:.1%}",
                f"{min(ends) / max(ends):.1%}",
                str(step["slowest_rank"]),
                f"{step['peak_live_tokens']:.0f}",
                f"{step['peak_in_flight']:.3g}",
            ]
        )
    print_table(rows)
    if len(steps) > _MAX_SHOWN:
        print(f"... {len(steps) - _MAX_SHOWN} more steps; --step S shows one")
    total = sum(step["makespan"] for step in steps.values())
    print(f"{len(steps)} step(s): {total:.4g} {unit}")
    print(f"time {pricing.basis}")
