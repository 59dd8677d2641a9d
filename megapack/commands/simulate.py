"""Predict the times of a plan's steps with the pipeline simulator, without a GPU."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megapack.commands.arguments import (
    add_json,
    integer,
    print_json,
    print_table,
    selected_steps,
)
from megapack.commands.costs import Pricing, add_costs, plan_pricing
from megapack.plan.file import read_plan

if TYPE_CHECKING:
    from megapack.outlook.stats import StepReport

_MAX_SHOWN = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add PLAN, --step and a cost model."""
    parser.add_argument("plan", metavar="PLAN", help="a plan.json, or the text of a plan")
    parser.add_argument("--step", type=integer, metavar="S", help="this step only")
    add_json(parser)
    add_costs(parser)


def run(args: argparse.Namespace) -> int:
    """Simulate and print."""
    plan = read_plan(args.plan)
    numbers = selected_steps(plan, args.step)
    pricing = plan_pricing(args, plan)
    # The simulator's compiler takes a third of a second to import: report bad input before.
    from megapack.outlook.stats import plan_report

    asked = replace(plan, steps=tuple(plan.steps[number] for number in numbers))
    report = plan_report(asked, cost=pricing.cost)
    steps = dict(zip(numbers, report.steps, strict=True))
    if args.json:
        unit = "seconds" if pricing.in_seconds else "tokens"
        payloads = {number: _payload(step) for number, step in steps.items()}
        print_json({"time_unit": unit, "time_basis": pricing.basis, "steps": payloads})
    else:
        _print(steps, report.seconds, pricing)
    return 0


def _payload(step: StepReport) -> dict[str, Any]:
    return {
        "num_microbatches": step.num_microbatches,
        "makespan": step.seconds,
        "bubble_fraction": step.bubble_fraction,
        "slowest_rank": step.slowest_rank,
        "rank_makespans": step.rank_seconds,
        "peak_live_tokens": step.peak_live_tokens,
        "peak_in_flight": step.peak_in_flight,
        "tokens": step.tokens,
        "shared_tokens": step.shared_tokens,
        "wide_rows": dict(step.wide_rows),
        "wide_fraction": step.wide_fraction,
        "num_pieces": step.num_pieces,
        "piece_fraction": step.piece_fraction,
        "num_split_backwards": step.num_split_backwards,
    }


def _print(steps: dict[int, StepReport], seconds: float, pricing: Pricing) -> None:
    unit = "seconds" if pricing.in_seconds else "token times"
    head = ["step", "M", unit, "bubble", "fastest rank", "slowest rank", "live tokens", "in flight"]
    shares = any(step.shared_tokens for step in steps.values())
    is_wide = any(step.wide_rows for step in steps.values())
    is_split = any(step.num_pieces for step in steps.values())
    has_weights = any(step.num_split_backwards for step in steps.values())
    head += [*["shared"] * shares, *["wide", "widest"] * is_wide]
    rows = [[*head, *["split", "pieces"] * is_split, *["split B"] * has_weights]]
    for number, step in list(steps.items())[:_MAX_SHOWN]:
        rows.append(
            [
                str(number),
                step.microbatch_span,
                f"{step.seconds:.4g}",
                f"{step.bubble_fraction:.1%}",
                f"{min(step.rank_seconds) / step.seconds:.1%}",
                str(step.slowest_rank),
                f"{step.peak_live_tokens:.0f}",
                f"{step.peak_in_flight:.3g}",
                *[f"{step.shared_fraction:.1%}"] * shares,
                *[f"{step.wide_fraction:.1%}", str(step.widest)] * is_wide,
                *[f"{step.piece_fraction:.1%}", str(step.num_pieces)] * is_split,
                *[str(step.num_split_backwards)] * has_weights,
            ]
        )
    print_table(rows)
    if len(steps) > _MAX_SHOWN:
        print(f"... {len(steps) - _MAX_SHOWN} more steps; --step S shows one")
    print(f"{len(steps)} step(s): {seconds:.4g} {unit}")
    print(f"time {pricing.basis}")
