"""Show what differs between two plans; exit code 1 if something does."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from megapack.commands.arguments import add_json, add_plan, print_json
from megapack.plan.file import read_plan
from megapack.plan.show import PlanDiff, diff_plans

EXAMPLE = "megapack diff plan.json other.json"
_MAX_SHOWN = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add two PLANs."""
    add_plan(parser)
    add_plan(parser, "OTHER")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Compare and print; 1 if the plans differ."""
    diff = diff_plans(read_plan(args.plan), read_plan(args.other))
    if args.json:
        print_json({"equal": diff.equal, **asdict(diff)})
    elif diff.equal:
        print(f"equal: digest {diff.digests[0][:12]}")
    else:
        _print(diff)
    return 0 if diff.equal else 1


def _print(diff: PlanDiff) -> None:
    print(f"digest {diff.digests[0][:12]} -> {diff.digests[1][:12]}")
    for key, (one, two) in diff.settings.items():
        print(f"{key}: {one} -> {two}")
    steps = [f"step {n}: {one}\n     -> {two}" for n, (one, two) in diff.steps.items()]
    _print_first(steps, "steps")
    _print_first([f"step {n}, order: {found}" for n, found in diff.orders.items()], "orders")
    moved = {
        "in another step": diff.other_step,
        "on another rank": diff.other_rank,
        "cut into other pieces": diff.other_pieces,
        "in another micro-batch": diff.other_microbatch,
    }
    for where, samples in moved.items():
        if samples:
            more = "" if len(samples) <= _MAX_SHOWN else ", ..."
            first = ", ".join(map(str, samples[:_MAX_SHOWN]))
            print(f"{len(samples)} samples {where}: {first}{more}")


def _print_first(lines: list[str], what: str) -> None:
    for line in lines[:_MAX_SHOWN]:
        print(line)
    if len(lines) > _MAX_SHOWN:
        print(f"... {len(lines) - _MAX_SHOWN} more {what}")
