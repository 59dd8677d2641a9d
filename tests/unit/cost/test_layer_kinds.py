"""Models whose first layers are dense: the split over stages, their costs and their memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megapack.cost.assumed import GpuSpeed, cost_from_sizes
from megapack.cost.memory import MemoryModel
from megapack.cost.sizes import ModelSizes
from megapack.errors import ConfigError
from megapack.layout import Layout

pytestmark = pytest.mark.unit

SIZES = ModelSizes(
    num_layers=8,
    hidden_size=256,
    ffn_hidden_size=64,
    moe_ffn_hidden_size=1024,
    num_attention_heads=4,
    vocab_size=128,
    num_experts=8,
    moe_top_k=4,
    moe_shared_ffn_hidden_size=512,
    moe_first_dense_layers=4,
    dtype="bf16",
    untie_embeddings=True,
)
PP2 = Layout(pp=2)


def test_cheap_dense_layers_move_the_split() -> None:
    assert SIZES.balanced_stage_layers(PP2, 100.0).num_layers == (6, 2)
    alike = replace(SIZES, moe_first_dense_layers=0)
    assert alike.balanced_stage_layers(PP2, 100.0).num_layers == (4, 4)


def test_weights_of_chunks_follow_their_layers() -> None:
    (dense, _), (experts, _) = SIZES.layer_kinds()
    first, last = SIZES.chunk_weights(PP2, 100.0)[0]
    want = (4 * dense.layer_cost(100.0) + 256) / (
        4 * experts.layer_cost(100.0) + SIZES.head_flops_per_token()
    )
    assert first / last == pytest.approx(want)
    assert first < last / 4


def test_stages_keep_what_their_layers_keep() -> None:
    memory = MemoryModel(sizes=SIZES)
    stages = [memory.stage(PP2, s, live_tokens=1000.0, row_tokens=1000.0) for s in (0, 1)]
    assert stages[0].activations < stages[1].activations / 2
    assert stages[0].parameters < stages[1].parameters / 10


def test_recomputed_experts_cost_only_where_there_are_experts() -> None:
    def backward_ratio(*modules: str) -> float:
        return cost_from_sizes(
            SIZES,
            Layout(),
            GpuSpeed(peak_tflops=1.0),
            recompute="selective",
            recompute_modules=modules,
            mean_length=100.0,
        ).backward_ratio

    assert backward_ratio("core_attn") == 2.0
    mlp = backward_ratio("mlp") - 2.0
    experts = backward_ratio("moe") - 2.0
    assert 0 < mlp < experts / 10
    assert backward_ratio("mlp", "moe") == pytest.approx(2.0 + mlp + experts)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"kv_lora_rank": 8}, "kv_lora_rank is set, so qk_nope_head_dim must be"),
        ({"moe_first_dense_layers": -1}, "moe_first_dense_layers=-1; set an integer of at least 0"),
        ({"num_experts": 0}, "num_experts=0; set an integer of at least 1"),
    ],
)
def test_sizes_that_do_not_fit_together(keys: dict[str, int | None], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(SIZES, **keys)  # type: ignore[arg-type]


def test_global_layers_have_heads_of_their_own() -> None:
    """Wider ones, in layers that are not spread evenly over the stages."""
    sizes = replace(
        SIZES,
        moe_first_dense_layers=0,
        num_query_groups=2,
        kv_channels=64,
        global_kv_channels=128,
        global_query_groups=1,
        global_keys_as_values=True,
        rotary_pattern="LLLLLLGG",
    )
    (local, num_local), (wide, num_wide) = sizes.layer_kinds()
    assert (num_local, num_wide) == (6, 2)
    assert (local.head_width, local.keys_as_values) == (64, False)
    assert (wide.head_width, wide.groups, wide.keys_as_values) == (128, 1, True)
    # Queries and the output, and keys that are the values too.
    assert wide.layer_parameters().split - local.layer_parameters().split == 256 * (
        2 * 4 * (128 - 64) + 128 - 2 * 2 * 64
    )
    assert wide.layer_flops_per_token_sq() == 2 * local.layer_flops_per_token_sq()
    memory = MemoryModel(sizes=sizes, attention="sdpa")
    cp2 = Layout(pp=2, cp=2)
    gathered = [
        memory.stage(cp2, s, live_tokens=0.0, row_tokens=0.0, gathered_tokens=1000.0).activations
        for s in (0, 1)
    ]
    # Stage 1 has 2 local layers, and 2 global ones with as many channels of keys.
    assert gathered == [1000 * 4 * 2 * 2 * 128, 1000 * 4 * 2 * 2 * 128 // 2]
    assert memory.saved(cp2, wide).carried_token == memory.saved(cp2, local).carried_token


@pytest.mark.parametrize("layout", [Layout(pp=pp, vpp=vpp) for pp in (2, 3, 4) for vpp in (1, 3)])
@pytest.mark.parametrize("utilisation", [0.3, 0.35, 0.35000000000000003, 0.45])
def test_equal_layers_have_one_share_of_squares(layout: Layout, utilisation: float) -> None:
    """Whatever attention's kernels reach: rounding is no difference between stages."""
    sizes = ModelSizes(num_layers=36, hidden_size=256, num_attention_heads=4, vocab_size=1000)
    speed = GpuSpeed(peak_tflops=1.0, attention_utilisation=utilisation)
    assert cost_from_sizes(sizes, layout, speed, mean_length=500).square_factors is None


def test_keys_of_a_window_have_no_weight_gradients() -> None:
    sizes = ModelSizes(num_layers=4, hidden_size=256, num_attention_heads=4, vocab_size=1)
    speed = GpuSpeed(peak_tflops=1.0)
    far, near = (
        cost_from_sizes(replace(sizes, attention_window=window), Layout(), speed, mean_length=9000)
        for window in (2048, 256)
    )
    # The same products, beside more seconds for each token.
    assert far.weight_ratio * far.per_token == pytest.approx(near.weight_ratio * near.per_token)
