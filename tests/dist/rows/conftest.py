"""Fixtures of the tests of rows."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.rows.row_cases import TESTED, run_row_cases
from tests.dist.run_cases import selected_names


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, dict[str, Any]]]:
    """The results of the cases of a module's selected tests, by case and objective."""
    wanted = selected_names(request)
    names = [name for name in TESTED if name in wanted]
    return run_row_cases(names, tmp_path_factory.mktemp("rows"))
