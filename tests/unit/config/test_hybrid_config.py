"""Keys of hybrid models: patterns, and sizes that their layers need."""

from __future__ import annotations

from typing import Any

import pytest

from megapack.config.model import ModelConfig
from megapack.errors import ConfigError

pytestmark = pytest.mark.unit

GATED_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


def test_each_letter_is_a_layer_of_a_stage() -> None:
    model = ModelConfig(num_layers=4, hybrid_layer_pattern="G-*-", **GATED_DELTA)
    assert model.layer_pattern == "G-*-"
    assert model.num_stage_layers == 4


def test_a_gpt_as_a_hybrid_model_has_two_layers_per_block() -> None:
    model = ModelConfig(
        num_layers=3, megatron_class="hybrid", num_experts=4, moe_first_dense_layers=1
    )
    assert model.layer_pattern == "*-*E*E"
    assert model.num_stage_layers == 6
    assert ModelConfig(num_layers=3).layer_pattern is None


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hybrid_layer_pattern": "*-", "num_layers": 3}, "2 letters and model.num_layers is 3"),
        ({"hybrid_layer_pattern": "*x", "num_layers": 2}, "has 'x'; set letters of GM"),
        ({"hybrid_layer_pattern": "", "num_layers": 2}, "is empty"),
        ({"hybrid_layer_pattern": "*-/*-", "num_layers": 2}, "1 parts after a /, and .* is 0"),
        (
            {"hybrid_layer_pattern": "*-/*-/-", "num_layers": 2, "mtp_num_layers": 2},
            "as many parts, all alike",
        ),
        ({"hybrid_layer_pattern": "G-", "num_layers": 2}, "model.linear_num_key_heads must be set"),
        ({"hybrid_layer_pattern": "*E", "num_layers": 2}, "model.num_experts must be set"),
        ({"hybrid_layer_pattern": "*-", "num_layers": 2, "megatron_class": "gpt"}, "leave one out"),
        ({"linear_num_key_heads": 2}, "set model.hybrid_layer_pattern too"),
        ({"position_embedding_type": "none"}, "set model.hybrid_layer_pattern too"),
        ({"activation": "squared_relu"}, "silu has a gate, the others have none"),
        (
            {
                "hybrid_layer_pattern": "G-",
                "num_layers": 2,
                **GATED_DELTA,
                "linear_num_value_heads": 3,
            },
            "is no multiple of model.linear_num_key_heads=2",
        ),
        (
            {"hybrid_layer_pattern": "M-", "num_layers": 2, "mamba_num_heads": 12},
            "is no multiple of model.mamba_num_groups=8",
        ),
    ],
)
def test_a_contradiction_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**keys)
