"""A job that has ended, normally or not, leaves nothing in the process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.spawn import checked_job, rank_reports

pytestmark = pytest.mark.dist


@pytest.mark.parametrize(
    ("overrides", "message"),
    [((), ""), (("data.path=missing.jsonl",), "missing.jsonl")],
    ids=["in-good-order", "failed-at-the-start"],
)
def test_a_job_leaves_nothing_behind(
    overrides: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    output = checked_job(
        2, "tests.dist.ranks.leftovers_worker", [str(tmp_path), *overrides], timeout_s=120
    )
    for report in rank_reports(tmp_path, 2):
        assert bool(report["error"]) == bool(message)
        assert message in report["error"]
        assert report["after"] == report["before"]
        assert report["after"]["threads"] == []
    assert "ResourceWarning" not in output
