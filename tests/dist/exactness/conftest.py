"""Fixtures of the tests with several processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist.run_cases import run_cases, selected_names


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the one-sample reference's gradients and log-probs; see `run_cases`."""
    return tmp_path_factory.mktemp("reference")


@pytest.fixture(scope="module")
def case_results(
    request: pytest.FixtureRequest, reference: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """The workers' results, by case, for those of the module's CASES that selected tests name."""
    wanted = selected_names(request)
    names = [name for name in request.module.CASES if name in wanted]
    return run_cases(names, reference, tmp_path_factory.mktemp("cases"))
