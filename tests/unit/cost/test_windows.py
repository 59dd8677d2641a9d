"""Work of layers with a sliding window: linear in the length of a sample, past the window."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megapack.cost.model import CostModel
from megapack.cost.sizes import ModelSizes
from megapack.layout import Layout

pytestmark = pytest.mark.unit

WINDOW = 128
FULL = ModelSizes(
    num_layers=8,
    hidden_size=256,
    ffn_hidden_size=512,
    num_attention_heads=8,
    vocab_size=1024,
    kv_channels=64,
)
SIZES = replace(FULL, attention_window=WINDOW, attention_window_pattern="LG")
LAYOUT = Layout()


def forward(sizes: ModelSizes, length: int) -> float:
    """Operations of the forward of a sample of this length, which is the typical one."""
    model = CostModel.from_model(sizes, layout=LAYOUT, flops_per_gpu=1.0, mean_length=length)
    return model.forward_seconds(LAYOUT, row_tokens=length, tokens_sq=length**2, num_samples=1)


@pytest.mark.parametrize("length", [64, 128, 256, 4096])
def test_operations_are_those_of_the_pairs_that_meet(length: int) -> None:
    """Per head and pair two dot products of 64 channels, in 4 of 8 layers fewer pairs."""
    missing = sum(max(0, position - WINDOW) for position in range(1, length + 1))
    spared = 4 * 8 * 2 * 2 * 64 * missing
    found = forward(FULL, length) - forward(SIZES, length)
    # Without a window a token is counted with half of its own pair.
    half_pairs = 4 * 8 * 2 * 64 * length if missing else 0
    assert found == pytest.approx(spared - half_pairs, rel=1e-2, abs=1.0)
    assert missing == 0 or found > 0


def test_layers_are_of_two_kinds() -> None:
    kinds = list(SIZES.layer_kinds())
    assert [(kind.window, count) for kind, count in kinds] == [(WINDOW, 4), (None, 4)]
    windowed, full = (kind for kind, _ in kinds)
    assert windowed.layer_flops_per_token_sq() == 0 < full.layer_flops_per_token_sq()
    assert sum(n * sum(kind.layer_parameters()) for kind, n in kinds) == 8 * sum(
        FULL.last_kind.layer_parameters()
    )


def test_chunks_with_more_windows_have_less_squares() -> None:
    uneven = replace(SIZES, attention_window_pattern="LLLLLLGG")
    model = CostModel.from_model(uneven, layout=Layout(pp=2), flops_per_gpu=1.0)
    assert model.square_factors is not None
    assert model.square_factors[0] == 0 < model.square_factors[1]
    even = CostModel.from_model(SIZES, layout=Layout(pp=2), flops_per_gpu=1.0)
    assert even.square_factors is None
    windows_only = replace(SIZES, attention_window_pattern=None)
    model = CostModel.from_model(windows_only, layout=LAYOUT, flops_per_gpu=1.0)
    assert model.per_token_sq == 0


def test_layers_without_a_window_are_spread_over_stages() -> None:
    """Full layers of long samples cost more, so the stage that has them gets fewer layers."""
    uneven = replace(SIZES, attention_window_pattern="LLLLLLGG", vocab_size=128)
    split = uneven.balanced_stage_layers(Layout(pp=2), mean_length=65536)
    first, second = split.num_layers
    assert first > second
