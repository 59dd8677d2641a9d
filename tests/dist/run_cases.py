"""Runs cases in jobs of as many ranks as they need."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.dist.exactness import cases
from tests.dist.spawn import checked_job

# A job that hangs ends after minutes, whatever the number of cases.
_CASES_PER_JOB = 8


def run_cases(names: Iterable[str], reference: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """Run cases of `exactness/cases.py`; returns the workers' results, by case.

    Args:
        reference: a folder for the one-sample reference's gradients and log-probs, one file per
            model. Those that are there are not made again.
        folder: for the workers' files.
    """
    names = list(names)
    all_cases = cases.EVERY_CASE
    models = sorted({model for name in names for model in all_cases[name].references})
    absent = [model for model in models if not (reference / f"{model}.pt").exists()]
    if absent:
        args = [str(reference), *absent]
        checked_job(1, "tests.dist.exactness.reference", args, timeout_s=300, te="")
    # Sort by model, so that each job reads few of the reference's files.
    ordered = sorted(names, key=lambda name: all_cases[name].references)
    worlds = {name: all_cases[name].world for name in ordered}
    return run_by_world(
        "tests.dist.exactness.worker", worlds, str(reference), folder, timeout_s=300
    )


def selected_parameters(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """The parameters of each selected test that asks for a module's fixture."""
    own = [item for item in request.session.items if item.module is request.module]
    own = [item for item in own if request.fixturename in item.fixturenames]
    return [item.callspec.params for item in own if hasattr(item, "callspec")]


def selected_names(request: pytest.FixtureRequest) -> set[str]:
    """The parameter `name` of each of them that has one."""
    return {found["name"] for found in selected_parameters(request) if "name" in found}


def run_by_world(
    worker: str, worlds: Mapping[str, int], reference: str, folder: Path, *, timeout_s: float
) -> dict[str, dict[str, Any]]:
    """Run a worker's cases in jobs of some with the same number of ranks; results by case.

    Args:
        worlds: case -> ranks.
        reference: the worker's first argument; the others are a file for results, and cases.
    """
    results: dict[str, dict[str, Any]] = {}
    for world in dict.fromkeys(worlds.values()):
        own = [name for name in worlds if worlds[name] == world]
        for first in range(0, len(own), _CASES_PER_JOB):
            out = folder / f"world{world}_{first}.json"
            args = [reference, str(out), *own[first : first + _CASES_PER_JOB]]
            checked_job(world, worker, args, timeout_s=timeout_s)
            results |= json.loads(out.read_text())
    return results
