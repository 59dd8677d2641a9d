"""Fixtures of the tests of rows."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.rows.row_cases import ALL_CASES, TESTED, run_row_cases
from tests.dist.run_cases import selected_parameters


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, dict[str, Any]]]:
    """The results of the cases of a module's selected tests, by case and objective."""
    cells = {(test["name"], test["kind"]) for test in selected_parameters(request)}
    kinds = {
        name: [kind for kind in ALL_CASES[name].kinds if (name, kind) in cells] for name in TESTED
    }
    names = [name for name in TESTED if kinds[name]]
    return run_row_cases(names, tmp_path_factory.mktemp("rows"), kinds)
