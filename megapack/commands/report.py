"""Write one HTML page about a plan or a run; it needs no network. The page of a plan shows its
timeline beside that of simple packing. The page of a run shows its losses, its planned timeline,
and predicted against measured times.
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from megapack.commands.arguments import (
    add_lengths,
    add_output,
    check_output,
    read_table,
    write_result,
)
from megapack.commands.costs import add_costs, plan_pricing, priced_plan
from megapack.commands.parser import Parser
from megapack.errors import ConfigError, PlanError

if TYPE_CHECKING:
    from megapack.job.view.page import Page

EXAMPLE = "megapack report plan.json lengths.csv -o report.html"


def add_arguments(parser: Parser) -> None:
    """Add PLAN or RUN, the LENGTHS of a plan, and a cost model."""
    parser.add_argument("target", metavar="PLAN|RUN", help="a plan.json, or a run's folder")
    add_output(parser, "report.html", "the page")
    add_lengths(parser, required=False)
    add_costs(parser)


def run(args: argparse.Namespace) -> int:
    """Write the page and print its notes."""
    output = check_output(args, args.target, args.lengths)
    if not os.path.exists(args.target):
        raise ConfigError(f"{args.target}: no such file; give a plan.json, or the folder of a run")
    page, basis = _run_page(args) if os.path.isdir(args.target) else _plan_page(args)
    page.notes.append(f"planned time {basis}")
    from megapack.job.view.page import page_html

    write_result(args, page_html(page))
    print(f"{output}: {page.title}")
    for note in page.notes:
        print(note)
    return 0


def _plan_page(args: argparse.Namespace) -> tuple[Page, str]:
    plan, _, pricing = priced_plan(args, args.target)
    lengths = None if args.lengths is None else read_table(args).lengths
    if lengths is not None and lengths.size != plan.num_samples:
        raise PlanError(
            f"{lengths.size} lengths for a plan of {plan.num_samples} samples; give the lengths "
            "that were planned"
        )
    # The simulator's compiler takes a third of a second to import: report bad input before.
    from megapack.job.view.page import plan_page

    unit = "s" if pricing.in_seconds else "token times"
    page = plan_page(plan, lengths, pricing.cost, unit)
    if lengths is None:
        page.notes.append("a plan does not contain its samples' lengths; give LENGTHS too")
    return page, pricing.basis


def _run_page(args: argparse.Namespace) -> tuple[Page, str]:
    if args.lengths is not None:
        raise ConfigError(
            f"{args.target} is a run, which has its own lengths; leave {args.lengths} out"
        )
    from megapack.job.view.page import run_page
    from megapack.job.view.records import read_run

    records = read_run(args.target)
    pricing = plan_pricing(args, records.plan)
    if pricing.in_seconds:
        return run_page(records, pricing.cost), pricing.basis
    basis = "of the run's cost model"
    if not (records.traced and records.traced[0].is_calibrated):
        basis += ", scaled to the seconds that the run had measured before the step"
    return run_page(records, None), basis
