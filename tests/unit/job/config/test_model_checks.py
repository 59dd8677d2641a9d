"""Keys of attention, rotary embeddings and experts that do not fit together, or not the layout."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import pytest

from megapack import ConfigError, Layout
from megapack.config import parse_config
from megapack.cost.rope import RopeScaling
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
        ({"rotary_percent": 0.2}, "rotary_percent=0.2 of 16 channels is not an even number"),
        ({"rotary_pattern": "LG"}, "needs model.local_rotary_base; set it"),
        ({**LOCAL, "rotary_pattern": "LS"}, "set letters L and G"),
        ({**LOCAL, "megatron_class": "hybrid"}, "does not run with a HybridModel"),
        ({**LOCAL, "mtp_num_layers": 1}, "does not run with mtp_num_layers=1"),
        ({**LOCAL, "rotary_interleaved": True}, "does not run with several rotary embeddings"),
        ({"qk_layernorm_over_heads": True}, "needs model.qk_layernorm;"),
        ({"attention_scale": 0.0}, "attention_scale is 0.0; set a number above 0"),
        ({**EXPERTS, "norm_placement": "post"}, "norm_placement=post does not run with num_exp"),
        ({**LATENT, "norm_placement": "sandwich"}, "does not run with multi-latent attention"),
        ({"v_head_dim": 16}, "v_head_dim=16 needs model.kv_lora_rank"),
        ({"kv_lora_rank": 32}, "model.qk_nope_head_dim must be"),
        ({**LATENT, "qkv_bias": True}, "qkv_bias=true does not run with multi-latent attention"),
        ({**LATENT, "kv_channels": 16}, "kv_channels=16 does not run with multi-latent"),
        ({**LATENT, "num_query_groups": 2}, "num_query_groups=2 does not run with multi-latent"),
        ({**LATENT, "qk_rope_head_dim": 15}, "qk_rope_head_dim=15 does not run with"),
        ({**LATENT, "rope_scaling": RopeScaling(kind="llama3")}, "kind=llama3 does not run with"),
        ({**LATENT, "indexer_top_k": 8}, "indexer_top_k=8 needs model.q_lora_rank"),
        ({"indexer_loss_coef": 1.0}, "indexer_loss_coef=1.0 needs model.indexer_top_k"),
        ({**SPARSE, "indexer_head_dim": 8}, "indexer_head_dim=8 is below model.qk_rope_head_dim"),
        ({**SPARSE, "qk_layernorm": False}, "indexer_top_k=8 needs model.qk_layernorm; set it"),
        ({**SPARSE, "attention": "varlen"}, "does not run with attention=varlen"),
        ({**SPARSE, "mtp_num_layers": 1}, "does not run with mtp_num_layers=1"),
        ({"moe_first_dense_layers": 1}, "moe_first_dense_layers=1 needs model.num_experts"),
        ({**EXPERTS, "moe_first_dense_layers": 4}, "leaves no layer of model.num_layers=4"),
        ({**EXPERTS, "moe_shared_gate": True}, "true needs model.moe_shared_ffn_hidden"),
        (
            {**EXPERTS, "moe_shared_ffn_hidden_size": 8, "linear_bias": True},
            "linear_bias=true does not run with moe_shared_ffn_hidden_size",
        ),
        (
            {**EXPERTS, "moe_norm_top_k": False, "moe_score_function": "sigmoid"},
            "moe_norm_top_k=false needs model.moe_score_function=softmax",
        ),
        ({**EXPERTS, "moe_route_scale": 0.0}, "moe_route_scale is 0.0"),
        ({**EXPERTS, "moe_num_groups": 4}, "moe_num_groups=4 needs model.moe_group_top_k"),
        ({**EXPERTS, "moe_num_groups": 3, "moe_group_top_k": 2}, "set a divisor of 16"),
        ({**EXPERTS, "moe_num_groups": 4, "moe_group_top_k": 3}, "not a multiple of"),
        ({**EXPERTS, "moe_num_groups": 8, "moe_group_top_k": 1}, "of at most 2"),
        ({**EXPERTS, "moe_group_best": 1}, "moe_group_best=1 needs model.moe_num_groups"),
        (
            {**EXPERTS, "moe_num_groups": 8, "moe_group_top_k": 2, "moe_group_best": 3},
            "moe_group_best=3 is above the 2 experts of a group",
        ),
        ({"qk_layernorm_after_rotation": True}, "needs model.qk_layernorm;"),
        (
            {**LATENT, "qk_layernorm": True, "qk_layernorm_after_rotation": True},
            "does not run with multi-latent attention",
        ),
        ({"logit_cap": 0.0}, "logit_cap is 0.0; set a number above 0"),
        ({"attention_score_cap": 50.0, "attention": "varlen"}, "not run with attention=varlen"),
        ({"attention_score_cap": 50.0, "attention_sinks": True}, "with attention_sinks"),
        ({"global_kv_channels": 32}, "global_kv_channels=32 needs model.rotary_pattern"),
        ({**GLOBAL, "global_kv_channels": 31}, "global_kv_channels=31 is odd"),
        ({**GLOBAL, "global_query_groups": 3}, "over model.global_query_groups=3; set a divisor"),
        ({**GLOBAL, "qkv_bias": True}, "global_keys_as_values=true does not run with qkv_bias"),
        (
            {**GLOBAL, "qk_layernorm": True, "qk_layernorm_over_heads": True},
            "does not run with heads of global layers",
        ),
        ({"layer_scalars": True}, "layer_scalars=true does not run with norm_placement=pre"),
        ({**EXPERTS, "moe_inner_norms": True}, "needs model.moe_shared_ffn_hidden_size"),
    ],
)
def test_keys_that_do_not_fit_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig(**keys)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_numbers_of_a_rope_scaling_that_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"set more than low_freq_factor=4\.0"):
        RopeScaling(kind="llama3", low_freq_factor=4.0)
    with pytest.raises(ConfigError, match=r"attention_factor is 0\.0; set a number above 0"):
        RopeScaling(kind="yarn", attention_factor=0.0)
    with pytest.raises(ConfigError, match=r"factor is 0\.5; set 1 or more"):
        RopeScaling(kind="yarn", factor=0.5)


def test_keys_of_latent_attention_have_channels_with_and_without_rotation() -> None:
    assert ModelConfig(**LATENT).head_width == 24 + 16
    assert ModelConfig().head_width == 16


def test_the_first_layers_are_dense() -> None:
    model = ModelConfig(**EXPERTS, moe_first_dense_layers=1)
    assert model.dense_layers == (True, False, False, False)
    assert ModelConfig().dense_layers == (True,) * 4


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
