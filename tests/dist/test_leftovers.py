"""A job that has ended, in good order or not, leaves nothing in the process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.dist.spawn import checked_job

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
    for rank in range(2):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert bool(found["error"]) == bool(says)
        assert says in found["error"]
        assert found["after"] == found["before"]
        assert found["after"]["threads"] == []
    assert "ResourceWarning" not in output
