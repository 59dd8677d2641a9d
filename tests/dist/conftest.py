"""What the tests of several processes share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist.cases import CASES
from tests.dist.run_cases import make_reference, run_cases


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The one-sample reference's per-sample gradients and log-probs."""
    return make_reference(tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="session")
def case_results(
    reference: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """What the workers found, by case."""
    return run_cases(CASES, reference, tmp_path_factory.mktemp("cases"))
