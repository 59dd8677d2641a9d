"""A disk that is full ends a run on every rank with one line, and costs no checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist.disk_worker import FAULTS
from tests.dist.spawn import checked_job, rank_reports

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """Per rank, for each fault, the error and the folders that it left; and then a sound save."""
    folder: Path = tmp_path_factory.mktemp("disk")
    checked_job(2, "tests.dist.disk_worker", [str(folder)], timeout_s=120)
    return rank_reports(folder, 2)


@pytest.mark.parametrize("index", range(len(FAULTS)), ids=lambda i: FAULTS[i][1])
def test_every_rank_hears_that_one_could_not_write(
    index: int, told: list[list[dict[str, Any]]]
) -> None:
    rank, _ = FAULTS[index]
    for found in told:
        error = found[index]["error"]
        assert "cannot be written" in error
        assert "No space left" in error or "failed writing" in error
        assert f"rank {rank}: " in error or f"by rank: {{{rank}: " in error
        assert "\n" not in error
        assert found[index]["left"] == ["step-00000001"]


def test_the_next_one_is_written_and_read(told: list[list[dict[str, Any]]]) -> None:
    assert [found[-1] for found in told] == [{"error": "", "left": [3]}] * 2
