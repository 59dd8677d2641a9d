"""Gradients of several steps add up, each reduced once, whether or not reductions overlap."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.exactness.several_steps_worker import CASES
from tests.dist.run_cases import selected_names
from tests.dist.spawn import checked_job, rank_reports

pytestmark = pytest.mark.dist


# The third has their parts.
WEEKLY_CASES = {"dp2", "dp2 overlap"}


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """By rank: results by case."""
    folder = tmp_path_factory.mktemp("several_steps")
    names = selected_names(request)
    args = [str(folder), *(name for name in CASES if name in names)]
    checked_job(2, "tests.dist.exactness.several_steps_worker", args, timeout_s=180)
    return rank_reports(folder, 2)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_the_sum_of_the_steps(name: str, reports: list[Any]) -> None:
    for report in reports:
        facts = report[name]
        assert facts["num_gradients"]
        assert facts["zero"] == []
        assert facts["different"] == []
        assert facts["after three"] == []
