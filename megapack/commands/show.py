"""Print a plan: a line per step, the grid of a step, or the rows of a rank."""

from __future__ import annotations

import argparse

from megapack.commands.arguments import add_plan, add_step, integer
from megapack.plan.file import read_plan
from megapack.plan.show import format_grid

EXAMPLE = "megapack show plan.json --step 0"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add PLAN, --step and --rank."""
    add_plan(parser)
    add_step(parser)
    parser.add_argument(
        "--rank", type=integer, metavar="R", help="the rows of this DP rank, with their samples"
    )


def run(args: argparse.Namespace) -> int:
    """Print."""
    print(format_grid(read_plan(args.plan), args.step, args.rank))
    return 0
