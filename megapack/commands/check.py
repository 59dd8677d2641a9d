"""Check the invariants of a plan; print the first broken one, with exit code 1."""

from __future__ import annotations

import argparse

from megapack.commands.arguments import add_json, add_lengths, add_plan, print_json, read_table
from megapack.errors import MegapackError
from megapack.plan.check import check_plan
from megapack.plan.file import read_plan

EXAMPLE = "megapack check plan.json lengths.csv"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add PLAN, and the LENGTHS that it was made from."""
    add_plan(parser)
    add_lengths(parser)
    parser.add_argument("--config", metavar="CONFIG", help="a config with the tokenizer of LENGTHS")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Check and print; 1 if an invariant is broken."""
    plan = read_plan(args.plan)
    table = read_table(args)
    problem = None
    try:
        check_plan(plan, table.lengths, table.images)
    except MegapackError as error:
        problem = str(error)
    if args.json:
        print_json({"digest": plan.digest(), "sound": problem is None, "problem": problem})
    elif problem is None:
        print(f"{args.plan}: sound, {plan.num_samples} samples in {len(plan.steps)} step(s)")
    else:
        print(f"{args.plan}: {problem}")
    return 0 if problem is None else 1
