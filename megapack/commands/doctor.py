"""Check this machine's software and settings for what would break a run."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from megapack.commands.arguments import add_json, number, print_json
from megapack.doctor.runner import DEFAULT_TIMEOUT_S, Diagnosis, diagnose
from megapack.errors import ConfigError

EXAMPLE = "megapack doctor"
_COLUMN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the time limit and the form of the output."""
    add_json(parser)
    parser.add_argument(
        "--timeout",
        type=number,
        default=DEFAULT_TIMEOUT_S,
        metavar="S",
        help=f"seconds after which the imports count as hung ({DEFAULT_TIMEOUT_S:g})",
    )


def run(args: argparse.Namespace) -> int:
    """Run the probes and print their diagnoses; 1 if there is a fault."""
    if not 0 < args.timeout < float("inf"):
        raise ConfigError(f"--timeout={args.timeout:g}; set seconds above 0")
    diagnoses = diagnose(args.timeout)
    num_faults = sum(len(diagnosis.faults) for diagnosis in diagnoses)
    if args.json:
        print_json({"num_faults": num_faults, "probes": [asdict(one) for one in diagnoses]})
    else:
        for diagnosis in diagnoses:
            _print(diagnosis)
        print(f"{num_faults} fault(s)")
    return 1 if num_faults else 0


def _print(diagnosis: Diagnosis) -> None:
    print(f"{diagnosis.probe:<{_COLUMN}}{diagnosis.found or 'broken'}")
    for fault in diagnosis.faults:
        print(f"{'':<{_COLUMN}}FAULT {fault}")
    for note in diagnosis.notes:
        print(f"{'':<{_COLUMN}}note: {note}")
