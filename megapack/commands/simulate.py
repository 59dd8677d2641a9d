"""Predict the times of a plan's steps with the pipeline simulator, without a GPU."""

from __future__ import annotations

import argparse
from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from megapack.commands.arguments import add_json, add_plan, add_step, print_json
from megapack.commands.costs import Pricing, add_costs, priced_plan
from megapack.commands.parser import Parser
from megapack.commands.tables import Column, fact_columns, print_columns
from megapack.plan.facts import columns_named, feature_columns, feature_numbers, features_of

if TYPE_CHECKING:
    from megapack.outlook.stats import StepReport

EXAMPLE = "megapack simulate plan.json --config qwen3_4b_dp4_tp2_gpu8"
_MAX_SHOWN = 32


def add_arguments(parser: Parser) -> None:
    """Add PLAN, --step and a cost model."""
    add_plan(parser)
    add_step(parser)
    add_json(parser)
    add_costs(parser)


def run(args: argparse.Namespace) -> int:
    """Simulate and print."""
    plan, numbers, pricing = priced_plan(args, args.plan)
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
        **feature_numbers(step),
    }


def _print(steps: dict[int, StepReport], seconds: float, pricing: Pricing) -> None:
    unit = "seconds" if pricing.in_seconds else "token times"
    report = itemgetter(1)
    more = columns_named("slowest rank", "live tokens", "in flight")
    more += feature_columns(features_of(*steps.values()))
    columns = [
        Column("step", lambda item: f"{item[0]}"),
        *fact_columns(columns_named("M"), report),
        Column(unit, lambda item: f"{item[1].seconds:.4g}"),
        *fact_columns(columns_named("bubble"), report),
        Column("fastest rank", lambda item: f"{min(item[1].rank_seconds) / item[1].seconds:.1%}"),
        *fact_columns(more, report),
    ]
    print_columns(columns, list(steps.items())[:_MAX_SHOWN])
    if len(steps) > _MAX_SHOWN:
        print(f"... {len(steps) - _MAX_SHOWN} more steps; --step S shows one")
    print(f"{len(steps)} step(s): {seconds:.4g} {unit}")
    print(f"time {pricing.basis}")
