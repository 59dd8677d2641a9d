"""Check this machine's software and settings for what would break a run."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from megapack.commands.arguments import add_json, print_json
from megapack.doctor.probes import Diagnosis
from megapack.doctor.runner import diagnose

EXAMPLE = "megapack doctor"
_COLUMN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --json."""
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run the probes and print their diagnoses; 1 if there is a fault."""
    diagnoses = diagnose()
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
