"""Checkpoints hold every tensor, every rank writes its share, and Megatron's format is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.spawn import checked_job, rank_reports
from tests.megatron import needs_hybrid

pytestmark = pytest.mark.dist


@pytest.mark.parametrize(
    ("tp", "ep", "variant"),
    [
        pytest.param(1, 1, "plain", id="dp2"),
        pytest.param(2, 1, "plain", id="tp2"),
        pytest.param(1, 2, "plain", id="dp2_ep2"),
        pytest.param(2, 1, "hybrid", id="tp2_hybrid", marks=needs_hybrid),
    ],
)
def test_tensors_come_back_bit_by_bit(tmp_path: Path, tp: int, ep: int, variant: str) -> None:
    """Written directly, from a copy while the weights change, and by Megatron with a gather."""
    checked_job(
        2,
        "tests.dist.checkpoint.checkpoint_worker",
        [str(tmp_path), str(tp), str(ep), variant],
        timeout_s=200,
    )
    reports = rank_reports(tmp_path, 2)
    for report in reports:
        assert report["loads"] == dict.fromkeys(["direct", "ahead", "staged", "megatron"], True)
        # One file per thread.
        assert report["files"] == 2
    # Replicas are spread: no rank writes much more than half.
    assert max(report["bytes"] for report in reports) < 0.55 * sum(
        report["bytes"] for report in reports
    )
