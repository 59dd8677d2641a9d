"""Fixtures of the tests of rows."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.rows.row_cases import TESTED, run_row_cases


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, dict[str, Any]]]:
    """The results of the cases of a module's selected tests, by case and objective."""
    tests = [item for item in request.session.items if "results" in item.fixturenames]
    wanted = {test.callspec.params["name"] for test in tests if test.module is request.module}
    names = [name for name in TESTED if name in wanted]
    return run_row_cases(names, tmp_path_factory.mktemp("rows"))
