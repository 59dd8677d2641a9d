"""A job that has ended, in good order or not, leaves nothing in the process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.spawn import checked_job, rank_reports

pytestmark = pytest.mark.dist


@pytest.mark.parametrize(
    ("overrides", "says"),
    [((), ""), (("data.path=missing.jsonl",), "missing.jsonl")],
    ids=["in-good-order", "failed-at-the-start"],
)
def test_nothing_is_left(overrides: tuple[str, ...], says: str, tmp_path: Path) -> None:
    output = checked_job(
        2, "tests.dist.leftovers_worker", [str(tmp_path), *overrides], timeout_s=120
    )
    for found in rank_reports(tmp_path, 2):
        assert bool(found["error"]) == bool(says)
        assert says in found["error"]
        assert found["after"] == found["before"]
        assert found["after"]["threads"] == []
    assert "ResourceWarning" not in output
