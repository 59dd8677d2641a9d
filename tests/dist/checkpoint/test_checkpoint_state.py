"""Checkpoints hold every tensor, every rank writes its share, and Megatron's format is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.spawn import checked_job, rank_reports
from tests.marks import needs_hybrid, needs_muon

pytestmark = pytest.mark.dist

# Others have the same parts.
WEEKLY_CASES = {
    *("dp2", "tp2", "dp2_frozen", "tp2_hybrid", "dp2_hybrid_bf16"),
}


@pytest.mark.parametrize(
    ("tp", "ep", "variant", "dtype", "optimizer"),
    [
        pytest.param(1, 1, "plain", "fp32", "distributed", id="dp2"),
        pytest.param(2, 1, "plain", "fp32", "distributed", id="tp2"),
        pytest.param(1, 2, "plain", "fp32", "distributed", id="dp2_ep2"),
        pytest.param(1, 2, "plain", "bf16", "adam", id="dp2_ep2_bf16_not_distributed"),
        pytest.param(
            *(1, 2, "mamba_latent", "bf16", "distributed"),
            id="dp2_ep2_latent_bf16",
            marks=needs_hybrid,
        ),
        pytest.param(2, 1, "hybrid", "fp32", "distributed", id="tp2_hybrid", marks=needs_hybrid),
        pytest.param(
            1, 1, "hybrid", "bf16", "distributed", id="dp2_hybrid_bf16", marks=needs_hybrid
        ),
        pytest.param(
            *(2, 1, "hybrid", "bf16", "adam"),
            id="tp2_hybrid_bf16_not_distributed",
            marks=needs_hybrid,
        ),
        pytest.param(1, 1, "frozen", "bf16", "adam", id="dp2_frozen"),
        pytest.param(1, 2, "plain", "bf16", "muon", id="dp2_ep2_bf16_muon", marks=needs_muon),
    ],
)
def test_tensors_come_back_bit_by_bit(
    tmp_path: Path, tp: int, ep: int, variant: str, dtype: str, optimizer: str
) -> None:
    """Written directly, from a copy while the weights change, and by Megatron with a gather.

    A bf16 model of recurrent layers has parameters in fp32.
    """
    checked_job(
        2,
        "tests.dist.checkpoint.checkpoint_worker",
        [str(tmp_path), str(tp), str(ep), variant, dtype, optimizer],
        timeout_s=200,
    )
    reports = rank_reports(tmp_path, 2)
    for report in reports:
        is_megatron = dtype == "fp32" and optimizer == "distributed"
        by_megatron = ["megatron"] if is_megatron else []
        assert report["loads"] == dict.fromkeys(["direct", "ahead", "staged", *by_megatron], True)
        assert report["moved"] == report["trained"]
        assert (report["trained"] < report["parameters"]) == (variant == "frozen")
        # A_log and dt_bias of a gated delta net; those and D of two or three Mamba-2 layers.
        fp32 = {"hybrid": 8, "mamba_latent": 9}.get(variant, 0)
        assert report["fp32"] == (report["parameters"] if dtype == "fp32" else fp32)
        # One file per thread.
        assert report["files"] == 2
    # Replicas are spread: no rank writes much more than half.
    total = sum(report["bytes"] for report in reports)
    assert max(report["bytes"] for report in reports) < 0.55 * total
