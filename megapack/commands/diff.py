"""Show what differs between two plans; exit code 1 if something does."""

from __future__ import annotations

import argparse

from megapack.commands.arguments import add_json, add_plan, print_json
from megapack.plan.file import read_plan
from megapack.plan.show import diff_plans

EXAMPLE = "megapack diff plan.json other.json"
_MAX_SHOWN = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add two PLANs."""
    add_plan(parser)
    add_plan(parser, "OTHER")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Compare and print; 1 if the plans differ."""
    plans = read_plan(args.plan), read_plan(args.other)
    first, second = (plan.digest() for plan in plans)
    found = diff_plans(*plans)
    if args.json:
        print_json({"equal": not found, "digests": (first, second), "differences": found})
    elif not found:
        print(f"equal: digest {first[:12]}")
    else:
        print(f"digest {first[:12]} -> {second[:12]}")
        print("\n".join(found[:_MAX_SHOWN]))
        if len(found) > _MAX_SHOWN:
            print(f"... {len(found) - _MAX_SHOWN} more differences")
    return 1 if found else 0
