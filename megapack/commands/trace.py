"""Write a timeline for Perfetto (ui.perfetto.dev) or chrome://tracing: the simulated steps of a
plan, or the planned and the measured steps of a run side by side.
"""

from __future__ import annotations

import argparse

from megapack.commands.arguments import (
    add_output,
    add_step,
    check_output,
    is_run,
    write_result,
)
from megapack.commands.costs import add_costs, priced_plan, priced_run
from megapack.commands.parser import Parser
from megapack.errors import ConfigError, DataError

EXAMPLE = "megapack trace plan.json -o trace.json"


def add_arguments(parser: Parser) -> None:
    """Add PLAN or RUN, --step, and a cost model."""
    parser.add_argument(
        "target", metavar="PLAN|RUN", help="a plan.json, or a run's folder (train.trace_steps)"
    )
    add_output(parser, "trace.json", "the timeline")
    add_step(parser)
    add_costs(parser)


def run(args: argparse.Namespace) -> int:
    """Write the timeline and print a summary."""
    output = check_output(args, args.target)
    of_run = is_run(args.target)
    text, num_steps, basis = _run_trace(args) if of_run else _plan_trace(args)
    write_result(args, text)
    sources = "planned and measured" if of_run else "planned"
    print(f"{output}: {num_steps} step(s), {sources}; open it at ui.perfetto.dev")
    print(f"planned time {basis}")
    return 0


def _plan_trace(args: argparse.Namespace) -> tuple[str, int, str]:
    plan, numbers, pricing = priced_plan(args, args.target)
    # The simulator's compiler takes a third of a second to import: report bad input before.
    from megapack.job.view.chrome_trace import chrome_trace
    from megapack.job.view.timeline import planned

    timelines = [planned(plan, number, number, pricing.cost) for number in numbers]
    in_seconds = pricing.in_seconds
    basis = pricing.basis if in_seconds else f"as microseconds, one per token; {pricing.basis}"
    return chrome_trace(timelines, 1e6 if in_seconds else 1.0), len(numbers), basis


def _run_trace(args: argparse.Namespace) -> tuple[str, int, str]:
    from megapack.job.view.chrome_trace import chrome_trace
    from megapack.job.view.timeline import traced

    records, cost, basis = priced_run(args, args.target)
    if not records.traced:
        raise DataError(f"{args.target} has no traced steps; set train.trace_steps=2 in its config")
    numbers = [step.number for step in records.traced]
    if args.step is not None and args.step not in numbers:
        raise ConfigError(f"step {args.step} is not traced; set --step to one of {numbers}")
    timelines = [t for t in traced(records, cost) if args.step in (None, t.number)]
    return chrome_trace(timelines), len({t.number for t in timelines}), basis
