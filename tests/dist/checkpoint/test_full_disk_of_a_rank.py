"""A full disk of one rank is an error on every rank, and no earlier checkpoint is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist.checkpoint.disk_worker import FAULTS
from tests.dist.spawn import checked_job, rank_reports

pytestmark = pytest.mark.dist


# tests/dist/checkpoint/test_resume.py saves in the main thread on a full disk.
SAVES = [
    pytest.param("false", marks=pytest.mark.weekly, id="sync"),
    pytest.param("true", id="async"),
]


@pytest.fixture(scope="module", params=SAVES)
def reports(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[list[dict[str, Any]]]:
    """Per rank: for each fault the error and the folders left; last, those of a save that works."""
    folder: Path = tmp_path_factory.mktemp("disk")
    checked_job(2, "tests.dist.checkpoint.disk_worker", [str(folder), request.param], timeout_s=180)
    return rank_reports(folder, 2)


@pytest.mark.parametrize("index", range(len(FAULTS)), ids=lambda i: FAULTS[i][1])
def test_every_rank_raises_if_one_cannot_write(
    index: int, reports: list[list[dict[str, Any]]]
) -> None:
    rank, _ = FAULTS[index]
    for report in reports:
        error = report[index]["error"]
        assert "cannot be written" in error
        assert "(No space left on device); make room" in error or "failed writing" in error
        assert f"rank {rank}: " in error or f"by rank: {{{rank}: " in error
        assert "\n" not in error
        assert report[index]["left"] == ["step-00000001"]


def test_the_next_checkpoint_is_written_and_read(reports: list[list[dict[str, Any]]]) -> None:
    assert [report[-1] for report in reports] == [{"error": "", "left": [3]}] * 2
