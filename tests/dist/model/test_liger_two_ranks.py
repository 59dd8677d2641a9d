"""Liger's head over a split vocabulary gives the numbers of torch's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.spawn import checked_job, rank_reports
from tests.liger_python import needs_liger

pytestmark = pytest.mark.dist


@needs_liger
def test_two_ranks_share_the_vocabulary(tmp_path: Path) -> None:
    checked_job(2, "tests.dist.model.liger_worker", [str(tmp_path)], timeout_s=200)
    for report in rank_reports(tmp_path, 2):
        assert max(report["errors"]) < 1e-5
