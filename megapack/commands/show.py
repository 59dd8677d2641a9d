"""Print a plan: a line per step, the grid of a step, or the rows of a rank."""

from __future__ import annotations

import argparse

from megapack.commands.arguments import integer
from megapack.plan.file import read_plan
from megapack.plan.show import format_grid


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add PLAN, --step and --rank."""
    parser.add_argument("plan", metavar="PLAN", help="a plan.json, or the text of a plan")
    parser.add_argument("--step", type=integer, metavar="S", help="this step's grid")
    parser.add_argument("--rank", type=integer, metavar="R", help="this DP rank's samples")


def run(args: argparse.Namespace) -> int:
    """Print."""
    print(format_grid(read_plan(args.plan), args.step, args.rank))
    return 0
