"""Layers with Transformer Engine's attention run each row on the ranks that share it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.spawn import checked_job, rank_reports

pytestmark = pytest.mark.dist


def test_rows_of_one_and_of_two_ranks_in_turn(tmp_path: Path) -> None:
    checked_job(2, "tests.dist.model.te_ranks_worker", [str(tmp_path)], timeout_s=250)
    for rank in rank_reports(tmp_path, 2):
        for found in rank.values():
            assert found["layers"] == 2
            assert found["left"] == 0
            assert found["same group"]
            assert max(found[f"step {number}"] for number in range(3)) < 1e-5
