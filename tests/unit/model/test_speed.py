"""Speeds of this machine's kernels: a product, the head, attention."""

from __future__ import annotations

import pytest
import torch

from megapack import Layout
from megapack.cost.sizes import ModelSizes
from megapack.model import speed

pytestmark = pytest.mark.unit

SIZES = ModelSizes(
    num_layers=4,
    hidden_size=128,
    ffn_hidden_size=512,
    num_attention_heads=4,
    num_query_groups=2,
    vocab_size=512,
)


def test_three_shares_of_a_peak_are_measured() -> None:
    torch.manual_seed(1)
    found = speed.measured_speed(SIZES, dtype="fp32")
    after = torch.rand(1)
    torch.manual_seed(1)
    assert after == torch.rand(1), "a run would draw other weights"
    shares = (found.utilisation, found.attention_utilisation, found.head_utilisation)
    assert found.is_measured
    assert all(0.05 <= share <= 1 and round(share * 20) == share * 20 for share in shares)
    assert found.peak_tflops is not None
    assert found.basis.startswith("measured: ")


def test_measured_costs_are_certain() -> None:
    cost = speed.measured_cost(SIZES, Layout(dp=2), mean_length=400, dtype="fp32", kernel="sdpa")
    assert cost.square_range == (1.0,)
    assert cost.per_token > 0
    assert cost.per_token_sq > 0


def test_a_kernel_that_fails_leaves_the_assumed_speed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(speed, "_attention", fail)
    found = speed.measured_speed(SIZES, dtype="fp32")
    assert not found.is_measured
    assert "the speeds of this machine are assumed: no kernel image" in caplog.text
