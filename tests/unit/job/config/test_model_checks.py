"""Keys of attention, rotary embeddings and experts that do not fit together, or not the layout."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import pytest

from megapack import ConfigError, Layout
from megapack.config import parse_config
from megapack.job.config.model_checks import check_sizes
from megapack.job.config.sections import ModelConfig, TrainConfig

pytestmark = pytest.mark.unit

LATENT: dict[str, Any] = {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
}
SPARSE: dict[str, Any] = {
    **LATENT,
    "q_lora_rank": 24,
    "qk_layernorm": True,
    "indexer_top_k": 8,
    "indexer_num_heads": 4,
    "indexer_head_dim": 16,
}
EXPERTS: dict[str, Any] = {"num_experts": 16, "moe_top_k": 4}
LOCAL: dict[str, Any] = {"local_rotary_base": 10000, "rotary_pattern": "LG"}
GLOBAL: dict[str, Any] = {**LOCAL, "global_keys_as_values": True}
TP2 = Layout(tp=2, sequence_parallel=True)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rotary_percent": 0.0}, "rotary_percent=0.0 of 16 channels is not an even number"),
        ({"rotary_pattern": "LG"}, "needs model.local_rotary_base; set it"),
        ({**LOCAL, "rotary_pattern": "LS"}, "set letters L and G"),
        ({**LOCAL, "hybrid_layer_pattern": "*-*-"}, "does not run with hybrid_layer_pattern"),
        ({**LOCAL, "rotary_interleaved": True}, "does not run with several rotary embeddings"),
        ({"qk_layernorm_over_heads": True}, "needs model.qk_layernorm;"),
        ({"attention_scale": 0.0}, "attention_scale is 0.0; set a number above 0"),
        ({**EXPERTS, "norm_placement": "post"}, "norm_placement=post does not run with num_exp"),
        ({"v_head_dim": 16}, "v_head_dim=16 needs model.kv_lora_rank"),
        ({"kv_lora_rank": 32}, "model.qk_nope_head_dim must be"),
        ({**LATENT, "kv_channels": 16}, "kv_channels=16 does not run with multi-latent"),
        ({**LATENT, "num_query_groups": 2}, "num_query_groups=2 does not run with multi-latent"),
        ({**SPARSE, "indexer_head_dim": 8}, "indexer_head_dim=8 is below model.qk_rope_head_dim"),
        ({**SPARSE, "qk_layernorm": False}, "indexer_top_k=8 needs model.qk_layernorm; set it"),
        ({**SPARSE, "attention": "varlen"}, "does not run with attention=varlen"),
        ({**EXPERTS, "moe_first_dense_layers": 4}, "leaves no layer of model.num_layers=4"),
        (
            {**EXPERTS, "moe_norm_top_k": False, "moe_score_function": "sigmoid"},
            "moe_norm_top_k=false needs model.moe_score_function=softmax",
        ),
        ({"moe_latent_size": 8}, "moe_latent_size=8 needs model.num_experts; set it"),
        ({**EXPERTS, "moe_latent_size": 0}, "moe_latent_size=0; set an integer of at least 1"),
        (
            {**EXPERTS, "moe_latent_size": 8, "linear_bias": True},
            "linear_bias=true does not run with moe_latent_size=8",
        ),
        ({**EXPERTS, "moe_num_groups": 3, "moe_group_top_k": 2}, "set a divisor of 16"),
        ({**EXPERTS, "moe_num_groups": 4, "moe_group_top_k": 3}, "not a multiple of"),
        ({**EXPERTS, "moe_num_groups": 8, "moe_group_top_k": 1}, "of at most 2"),
        (
            {**EXPERTS, "moe_num_groups": 8, "moe_group_top_k": 2, "moe_group_best": 3},
            "moe_group_best=3 is above the 2 experts of a group",
        ),
        ({**GLOBAL, "global_query_groups": 3}, "over model.global_query_groups=3; set a divisor"),
        ({**GLOBAL, "qkv_bias": True}, "global_keys_as_values=true does not run with qkv_bias"),
        ({"layer_scalars": True}, "layer_scalars=true does not run with norm_placement=pre"),
    ],
)
def test_keys_that_do_not_fit_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig(**keys)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "layout", "message"),
    [
        (LATENT, Layout(tp=2), "needs layout.sequence_parallel=true"),
        ({**LATENT, "num_attention_heads": 3}, TP2, "model.num_attention_heads=3"),
        ({**EXPERTS, "moe_shared_ffn_hidden_size": 33}, TP2, "moe_shared_ffn_hidden_size=33"),
    ],
)
def test_layouts_that_do_not_divide_the_sizes_are_refused(
    keys: dict[str, Any], layout: Layout, message: str
) -> None:
    model = ModelConfig(**keys)
    with pytest.raises(ConfigError, match=message):
        check_sizes(model, layout)
    check_sizes(model, Layout())


def test_a_dense_width_beside_experts_is_not_that_of_an_expert() -> None:
    """Without dense layers nothing has this width, so that it need not divide."""
    model = ModelConfig(**EXPERTS, ffn_hidden_size=33, moe_ffn_hidden_size=32)
    check_sizes(model, TP2)
    with pytest.raises(ConfigError, match="33"):
        check_sizes(dataclasses.replace(model, moe_first_dense_layers=1), TP2)


def test_a_job_with_latent_attention_needs_sequence_parallelism() -> None:
    keys = ", ".join(f"{name}: {value}" for name, value in LATENT.items())
    text = f"name: x\nplan: {{max_tokens_per_gpu: 99}}\nlayout: {{tp: 2}}\nmodel: {{{keys}}}\n"
    with pytest.raises(ConfigError, match=r"layout.tp=2 needs layout.sequence_parallel=true"):
        parse_config(text, [], TrainConfig)
    job = parse_config(text, ["layout.sequence_parallel=true"], TrainConfig)
    assert job.model == ModelConfig(**LATENT)


def test_fp8_needs_whole_blocks_of_query_key_and_value_channels() -> None:
    """4 heads and 1 group of 8 channels: (4 + 2) * 8 = 48 rows of a weight, 32 to a block."""
    model = ModelConfig(num_attention_heads=4, num_query_groups=1, kv_channels=8, hidden_size=64)
    half = dataclasses.replace(model, attention="te", dtype="bf16")
    check_sizes(dataclasses.replace(half, fp8="delayed"), Layout(fp8=True))
    recipes: tuple[Literal["mxfp8", "nvfp4"], ...] = ("mxfp8", "nvfp4")
    for recipe in recipes:
        with pytest.raises(ConfigError, match=r"2 \* num_query_groups\) \* head width=48"):
            check_sizes(dataclasses.replace(half, fp8=recipe), Layout(fp8=recipe))


def test_fp8_needs_whole_blocks_of_the_latent_width_of_experts() -> None:
    sizes = {**EXPERTS, "hidden_size": 128, "num_attention_heads": 8, "moe_latent_size": 24}
    model = ModelConfig(**sizes, moe_ffn_hidden_size=128, dtype="bf16")
    check_sizes(model, Layout())
    with pytest.raises(ConfigError, match=r"model.moe_latent_size=24 .* is no multiple of 16"):
        check_sizes(dataclasses.replace(model, fp8="delayed"), Layout(fp8=True))
    check_sizes(dataclasses.replace(model, fp8="delayed", moe_latent_size=32), Layout(fp8=True))
