"""Rows packed ahead for the announced step are used if that step is called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist.schedule.prefetch_worker import CHANGES
from tests.dist.spawn import checked_job, rank_reports

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of each rank."""
    folder: Path = tmp_path_factory.mktemp("prefetch")
    checked_job(2, "tests.dist.schedule.prefetch_worker", [str(folder)], timeout_s=120)
    return rank_reports(folder, 2)


def test_rows_are_packed_once(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["announced"]["packed"] == sum(rank["announced"]["counts"])
        assert rank["announced"]["packed"] == rank["unannounced"]["packed"]
        assert rank["announced"]["loss"] == rank["unannounced"]["loss"]


@pytest.mark.parametrize("change", CHANGES)
def test_an_unannounced_call_is_packed_again(change: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        changed = rank[change]
        unannounced = rank[f"{change}, unannounced"]
        # The rows of the announced step were packed in vain.
        assert changed["packed"] == unannounced["packed"] + changed["counts"][1]
        assert changed["loss"] == unannounced["loss"]
    assert ranks[0][change]["loss"] != ranks[0]["announced"]["loss"]


@pytest.mark.parametrize(
    "and_then", [pytest.param("silent", marks=pytest.mark.weekly), "announcing"]
)
def test_an_unannounced_call_on_one_rank_fails_on_all(and_then: str, tmp_path: Path) -> None:
    args = [str(tmp_path), and_then]
    # Rank 0 has begun its step, which is left there.
    checked_job(2, "tests.dist.schedule.prefetch_worker", args, timeout_s=120, nccl_rules=False)
    errors = [report["error"] for report in rank_reports(tmp_path, 2)]
    assert errors[0] == errors[1]
    assert "rank 1 failed in step 1 of plan" in errors[0]
    assert "is not the call that next_step announced" in errors[0]
