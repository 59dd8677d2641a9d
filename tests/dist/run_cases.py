"""Runs cases of `cases.py`, each on the ranks that it needs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.dist.cases import ALL_CASES
from tests.dist.prefix_cases import ALL_CASES as PREFIX_CASES
from tests.dist.spawn import checked_job

# Each case leaves its process groups and their threads behind, which slow down the next case.
_CASES_PER_JOB = 8


def make_reference(folder: Path) -> Path:
    """Write the one-sample reference's gradients and log-probs: one file per model."""
    checked_job(1, "tests.dist.reference", [str(folder)], timeout_s=300)
    return folder


def run_cases(names: Iterable[str], reference: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """Run the cases; returns the workers' results, by case."""
    by_world: dict[int, list[str]] = {}
    # Sort by model, so that each job reads few of the reference's files.
    for name in sorted(names, key=lambda name: ALL_CASES[name].variant):
        by_world.setdefault(ALL_CASES[name].world, []).append(name)
    results: dict[str, dict[str, Any]] = {}
    for world, own in by_world.items():
        for first in range(0, len(own), _CASES_PER_JOB):
            out = folder / f"world{world}_{first}.json"
            args = [str(reference), str(out), *own[first : first + _CASES_PER_JOB]]
            checked_job(world, "tests.dist.worker", args, timeout_s=300)
            results |= json.loads(out.read_text())
    return results


def run_prefix_cases(names: Iterable[str], folder: Path) -> dict[str, dict[str, Any]]:
    """Run cases of `prefix_cases.py` and their reference; results by case and objective."""
    wanted = list(names)
    reference = str(folder / "prefixes.pt")
    checked_job(1, "tests.dist.prefix_reference", [reference, *wanted], timeout_s=600)
    by_world: dict[int, list[str]] = {}
    for name in wanted:
        by_world.setdefault(PREFIX_CASES[name].world, []).append(name)
    results: dict[str, dict[str, Any]] = {}
    for world, own in by_world.items():
        for first in range(0, len(own), _CASES_PER_JOB):
            out = folder / f"prefixes{world}_{first}.json"
            args = [reference, str(out), *own[first : first + _CASES_PER_JOB]]
            checked_job(world, "tests.dist.prefix_worker", args, timeout_s=600)
            results |= json.loads(out.read_text())
    return {name: results[name] for name in wanted}
