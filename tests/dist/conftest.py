"""One launch per world size serves all its cases: starting four ranks takes longer than a case."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.dist.spawn import checked_job


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The one-sample reference's per-sample gradients and log-probs."""
    path = tmp_path_factory.mktemp("reference") / "samples.pt"
    checked_job(1, "tests.dist.reference", [str(path)], timeout_s=300)
    return path


@pytest.fixture(scope="session")
def case_results(
    reference: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """What the worker found, by case."""
    results: dict[str, dict[str, Any]] = {}
    folder = tmp_path_factory.mktemp("cases")
    for world in (1, 2, 4):
        out = folder / f"world{world}.json"
        checked_job(world, "tests.dist.worker", [str(reference), str(out)], timeout_s=600)
        results.update(json.loads(out.read_text()))
    return results
