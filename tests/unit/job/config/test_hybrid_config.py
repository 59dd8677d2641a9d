"""Keys of hybrid models: patterns, and sizes that their layers need."""

from __future__ import annotations

from typing import Any

import pytest

from megapack.config.load import load_config
from megapack.config.shipped import find_config
from megapack.errors import ConfigError
from megapack.job.config.model import ModelConfig
from megapack.job.config.sections import TrainConfig
from tests.unit.job.config.test_model_checks import LATENT, SPARSE

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
    assert model.num_layers == 4


@pytest.mark.parametrize("megatron_class", ["auto", "gpt", "hybrid", None])
def test_without_a_pattern_layers_are_blocks(megatron_class: Any) -> None:
    model = ModelConfig(num_layers=3, megatron_class=megatron_class, num_experts=4)
    assert model.layer_pattern is None
    assert model.num_layers == 3


def test_letters_of_latent_and_sparse_attention_are_those_of_attention() -> None:
    latent = ModelConfig(num_layers=2, hybrid_layer_pattern="+-/+-", mtp_num_layers=1, **LATENT)
    assert (latent.layer_pattern, latent.mtp_pattern) == ("*-", "*-")
    assert ModelConfig(num_layers=2, hybrid_layer_pattern="D-", **SPARSE).layer_pattern == "*-"


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
        ({"linear_num_key_heads": 2}, "needs model.hybrid_layer_pattern"),
        (
            {"hybrid_layer_pattern": "*-", "num_layers": 2, "num_experts": 4},
            "'[*]-' has no layer E for model.num_experts=4",
        ),
        ({"hybrid_layer_pattern": "*-", "num_layers": 2, **GATED_DELTA}, "has no layer G"),
        ({"hybrid_layer_pattern": "*-", "num_layers": 2, "mamba_num_heads": 4}, "no layer M"),
        ({"position_embedding_type": "none"}, "does not run with whole blocks"),
        ({"hybrid_layer_pattern": "+-", "num_layers": 2}, "model.kv_lora_rank must be set"),
        ({"hybrid_layer_pattern": "D-", "num_layers": 2, **LATENT}, "indexer_top_k must be set"),
        ({"hybrid_layer_pattern": "+-", "num_layers": 2, **SPARSE}, "are of one kind; write each"),
        ({"hybrid_layer_pattern": "*D", "num_layers": 2, **SPARSE}, "are of one kind; write each"),
        (
            {"hybrid_layer_pattern": "*-", "num_layers": 2, "norm_placement": "sandwich"},
            "does not run with hybrid_layer_pattern",
        ),
        ({"activation": "squared_relu"}, "silu and gelu_tanh have a gate, the others have none"),
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


def nemotron(*overrides: str) -> TrainConfig:
    path = find_config("configs/nemotron3_nano_30b_a3b_dp8_pp4_ep8_gpu32.yaml")
    return load_config(path, list(overrides), TrainConfig)


def test_stages_share_the_letters() -> None:
    config = nemotron()
    assert config.stage_layers.num_layers == (13, 13, 13, 13)
    assert config.model.layer_pattern == config.model.hybrid_layer_pattern


def test_pieces_are_worth_the_states_at_their_end() -> None:
    assert nemotron().row_plan.least_piece is None
    auto = "plan.split_samples=auto"
    config = nemotron(auto)
    assert config.row_plan.least_piece == config.memory_model().least_piece(config.layout) == 352
    assert nemotron(auto, "model.recompute=none").row_plan.least_piece == 23
    assert nemotron(auto, "plan.least_piece=64").row_plan.least_piece == 64
    gpt = find_config("configs/gpt_tiny_dp2_pp2_vpp2_cpu.yaml")
    assert load_config(gpt, [auto], TrainConfig).row_plan.least_piece is None


def test_rows_lie_over_as_many_ranks_as_heads_divide() -> None:
    assert nemotron().row_plan.max_width is None
    dynamic = "plan.context_parallel=dynamic"
    assert nemotron(dynamic).row_plan.max_width == 64
    tp = ("layout.tp=2", "layout.sequence_parallel=true", "layout.cp=2")
    assert nemotron(dynamic, *tp).row_plan.max_width == 16
    assert nemotron(dynamic, "plan.max_width=4").row_plan.max_width == 4
    with pytest.raises(ConfigError, match=r"max_width=128 with layout.tp=1 .* up to 64 DP ranks"):
        nemotron(dynamic, "plan.max_width=128")
    with pytest.raises(ConfigError, match=r"mamba_num_heads=64.* do not divide over layout.tp"):
        nemotron("layout.cp=128")
