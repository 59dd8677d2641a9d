"""`megapack doctor`: print what of this machine's software and settings a run would trip over."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from megapack.commands.arguments import add_json, number, print_json
from megapack.doctor.runner import DEFAULT_TIMEOUT_S, Diagnosis, diagnose
from megapack.errors import ConfigError

_COLUMN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The time limit, and the form of the output."""
    add_json(parser)
    parser.add_argument(
        "--timeout",
        type=number,
        default=DEFAULT_TIMEOUT_S,
        metavar="S",
        help=f"seconds after which the imports count as hung ({DEFAULT_TIMEOUT_S:g})",
    )


def run(args: argparse.Namespace) -> int:
    """Run the probes and print what they found; exit code 1 if there is a fault."""
    if not 0 < args.timeout < float("inf"):
        raise ConfigError(f"--timeout={args.timeout:g}; set seconds above 0")
    found = diagnose(args.timeout)
    num_faults = sum(len(diagnosis.faults) for diagnosis in found)
    if args.json:
        print_json({"num_faults": num_faults, "probes": [asdict(one) for one in found]})
    else:
        for diagnosis in found:
            _print(diagnosis)
        print(f"{num_faults} fault(s)")
    return 1 if num_faults else 0


def _print(diagnosis: Diagnosis) -> None:
    print(f"{diagnosis.probe:<{_COLUMN}}{diagnosis.found or 'broken'}")
    for fault in diagnosis.faults:
        print(f"{'':<{_COLUMN}}FAULT {fault}")
    for note in diagnosis.notes:
        print(f"{'':<{_COLUMN}}note: {note}")
