"""Runs cases of `cases.py`, each on the ranks that it needs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.dist.exactness.cases import ALL_CASES
from tests.dist.problem import PRECISE
from tests.dist.rows.prefix_cases import ALL_CASES as PREFIX_CASES
from tests.dist.rows.row_problem import RowCase
from tests.dist.rows.split_cases import ALL_CASES as SPLIT_CASES
from tests.dist.rows.wide_cases import ALL_CASES as WIDE_CASES
from tests.dist.spawn import checked_job

# Each case leaves its process groups and their threads behind, which slow down the next case.
_CASES_PER_JOB = 8


def run_cases(names: Iterable[str], reference: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """Run the cases; returns the workers' results, by case.

    Args:
        reference: a folder for the one-sample reference's gradients and log-probs, one file per
            model. Those that are there are not made again.
        folder: for the workers' files.
    """
    names = list(names)
    models = {ALL_CASES[name].variant for name in names}
    models |= {PRECISE.get(model, model) for model in models}
    absent = [model for model in sorted(models) if not (reference / f"{model}.pt").exists()]
    if absent:
        args = [str(reference), *absent]
        checked_job(1, "tests.dist.exactness.reference", args, timeout_s=300, te="")
    by_world: dict[int, list[str]] = {}
    # Sort by model, so that each job reads few of the reference's files.
    for name in sorted(names, key=lambda name: ALL_CASES[name].variant):
        by_world.setdefault(ALL_CASES[name].world, []).append(name)
    results: dict[str, dict[str, Any]] = {}
    for world, own in by_world.items():
        for first in range(0, len(own), _CASES_PER_JOB):
            out = folder / f"world{world}_{first}.json"
            args = [str(reference), str(out), *own[first : first + _CASES_PER_JOB]]
            checked_job(world, "tests.dist.exactness.worker", args, timeout_s=300)
            results |= json.loads(out.read_text())
    return results


def run_prefix_cases(names: Iterable[str], folder: Path) -> dict[str, dict[str, Any]]:
    """Run cases of `prefix_cases.py` and their reference; results by case and objective."""
    return _run_row_cases(
        list(names),
        folder,
        all_cases=PREFIX_CASES,
        module="tests.dist.rows.prefix_cases",
        worker="tests.dist.rows.row_worker",
    )


def run_wide_cases(names: Iterable[str], folder: Path) -> dict[str, dict[str, Any]]:
    """Run cases of `wide_cases.py` and their reference; results by case and objective."""
    return _run_row_cases(
        list(names),
        folder,
        all_cases=WIDE_CASES,
        module="tests.dist.rows.wide_cases",
        worker="tests.dist.rows.wide_worker",
    )


def run_split_cases(names: Iterable[str], folder: Path) -> dict[str, dict[str, Any]]:
    """Run cases of `split_cases.py` and their reference; results by case and objective."""
    return _run_row_cases(
        list(names),
        folder,
        all_cases=SPLIT_CASES,
        module="tests.dist.rows.split_cases",
        worker="tests.dist.rows.split_worker",
    )


def _run_row_cases(
    names: list[str], folder: Path, *, all_cases: Mapping[str, RowCase], module: str, worker: str
) -> dict[str, dict[str, Any]]:
    reference = str(folder / "reference.pt")
    args = [module, reference, *names]
    checked_job(1, "tests.dist.rows.row_reference", args, timeout_s=600, te="")
    by_world: dict[int, list[str]] = {}
    for name in names:
        by_world.setdefault(all_cases[name].world, []).append(name)
    results: dict[str, dict[str, Any]] = {}
    for world, own in by_world.items():
        for first in range(0, len(own), _CASES_PER_JOB):
            out = folder / f"world{world}_{first}.json"
            args = [module, reference, str(out), *own[first : first + _CASES_PER_JOB]]
            checked_job(world, worker, args, timeout_s=600)
            results |= json.loads(out.read_text())
    return {name: results[name] for name in names}
