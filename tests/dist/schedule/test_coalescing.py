"""What `megapack.cpu` changes in torch's coalescing of collectives."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.spawn import checked_job, rank_reports

pytestmark = pytest.mark.dist


def test_a_handle_waits_for_all_collectives(tmp_path: Path) -> None:
    checked_job(2, "tests.dist.schedule.coalescing_worker", [str(tmp_path)], timeout_s=60)
    for found in rank_reports(tmp_path, 2):
        assert found == {"ddp": [[3.0], [3.0]], "fp8 rows": [[3.0], [3.0]]}
