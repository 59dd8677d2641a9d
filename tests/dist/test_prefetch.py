"""What was prepared for the next step is used where that is the step that comes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist.prefetch_worker import CHANGES
from tests.dist.spawn import checked_job, rank_reports

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found."""
    folder: Path = tmp_path_factory.mktemp("prefetch")
    checked_job(2, "tests.dist.prefetch_worker", [str(folder)], timeout_s=120)
    return rank_reports(folder, 2)


def test_rows_are_packed_once(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["same"]["packed"] == sum(rank["same"]["counts"]) == rank["alone"]["packed"]
        assert rank["same"]["loss"] == rank["alone"]["loss"]


@pytest.mark.parametrize("change", CHANGES)
def test_another_call_than_was_prepared_for_is_packed_anew(
    change: str, ranks: list[dict[str, Any]]
) -> None:
    for rank in ranks:
        found, alone = rank[change], rank[f"{change}, alone"]
        # The rows of the step that did not come.
        assert found["packed"] == alone["packed"] + found["counts"][1]
        assert found["loss"] == alone["loss"]
    if change in ("other_advantages", "other_objective", "first_step_again"):
        assert ranks[0][change]["loss"] != ranks[0]["same"]["loss"]


@pytest.mark.parametrize("and_then", ["silent", "announcing"])
def test_a_rank_that_alone_makes_another_call_holds_nobody_up(
    and_then: str, tmp_path: Path
) -> None:
    checked_job(2, "tests.dist.prefetch_worker", [str(tmp_path), and_then], timeout_s=120)
    told = [report["error"] for report in rank_reports(tmp_path, 2)]
    assert told[0] == told[1]
    assert "rank 1 failed in step 1 of plan" in told[0]
    assert "is another call than next_step announced" in told[0]
