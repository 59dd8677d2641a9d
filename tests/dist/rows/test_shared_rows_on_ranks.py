"""A step on rows with shared prefixes equals the step on rows without, on several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.spawn import checked_job, rank_reports

pytestmark = pytest.mark.dist


def test_a_step_on_shared_rows_equals_the_unshared_step(tmp_path: Path) -> None:
    checked_job(2, "tests.dist.rows.shared_rows_worker", [str(tmp_path)], timeout_s=250)
    for rank in rank_reports(tmp_path, 2):
        for found in rank.values():
            assert found["saved"] > 60
            assert found["norm"] > 1e-2
            assert found["losses"][1] == pytest.approx(found["losses"][0], rel=1e-5)
            assert found["error"] < 1e-5
            assert found["refusal"].startswith("hidden_dropout=0.1 with shared prefixes: ")
