"""Runs cases of `cases.py` on as many ranks as each needs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.dist.cases import CASES
from tests.dist.spawn import checked_job

# Every case leaves its process groups and their threads behind, which slow down the next.
_CASES_PER_JOB = 8


def make_reference(folder: Path) -> Path:
    """The one-sample reference's per-sample gradients and log-probs: a file per model, here."""
    checked_job(1, "tests.dist.reference", [str(folder)], timeout_s=300)
    return folder


def run_cases(names: Iterable[str], reference: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """What the workers found, by case."""
    by_world: dict[int, list[str]] = {}
    # Cases of one model side by side, so that a job reads few of the reference's files.
    for name in sorted(names, key=lambda name: CASES[name].variant):
        by_world.setdefault(CASES[name].world, []).append(name)
    found: dict[str, dict[str, Any]] = {}
    for world, mine in by_world.items():
        for first in range(0, len(mine), _CASES_PER_JOB):
            out = folder / f"world{world}_{first}.json"
            args = [str(reference), str(out), *mine[first : first + _CASES_PER_JOB]]
            checked_job(world, "tests.dist.worker", args, timeout_s=300)
            found |= json.loads(out.read_text())
    return found
