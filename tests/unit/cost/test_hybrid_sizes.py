"""Hybrid models: weights, operations, memory, and stages with other shares of attention."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megapack.base.choices import Recompute
from megapack.config.load import load_config
from megapack.config.shipped import find_config
from megapack.cost.assumed import GpuSpeed, cost_from_sizes
from megapack.cost.memory import Carried, MemoryModel
from megapack.cost.model import CostModel
from megapack.cost.sizes import ModelSizes
from megapack.errors import ConfigError
from megapack.job.config.sections import TrainConfig
from megapack.layout import Layout

pytestmark = pytest.mark.unit

QWEN3_NEXT = "qwen3_next_80b_a3b_dp16_pp4_ep16_gpu64"
QWEN3P5 = "qwen3p5_35b_a3b_dp16_pp2_ep8_gpu32"
NEMOTRON3 = "nemotron3_nano_30b_a3b_dp8_pp4_ep8_gpu32"
NEMOTRON3_SUPER = "nemotron3_super_120b_a12b_dp16_pp4_ep16_gpu64"

# Each stage of pp=2 has other layers: attention is on the first one only.
UNEVEN = ModelSizes(
    num_layers=4,
    hybrid_layer_pattern="*-M-",
    hidden_size=64,
    ffn_hidden_size=128,
    num_attention_heads=4,
    vocab_size=100,
    mamba_num_heads=8,
    mamba_head_dim=16,
    mamba_state_dim=32,
    mamba_num_groups=2,
    dtype="bf16",
    untie_embeddings=True,
)
GATED_DELTA = replace(
    UNEVEN,
    hybrid_layer_pattern="G-*-",
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=32,
)
PP2 = Layout(pp=2)


def config_of(name: str) -> TrainConfig:
    return load_config(find_config(f"configs/{name}.yaml"), [], TrainConfig)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        # 80B in total and 3B active: the model's card and its name. Without both matrices of the
        # vocabulary, which are 0.62B, 3.25B are active; the card has 79B without the embedding.
        (QWEN3_NEXT, 79.7, 3.25),
        # 35B and 3B, without the vision tower: its card.
        (QWEN3P5, 34.7, 2.44),
        # 31.6B and 3.2B, or 3.6B with embeddings: its card and technical report.
        (NEMOTRON3, 31.6, 2.88),
        # 120.6B and 12.7B with embeddings, which are 1.07B: its technical report.
        (NEMOTRON3_SUPER, 120.67, 11.70),
    ],
)
def test_published_parameters(name: str, total: float, active: float) -> None:
    sizes = config_of(name).model
    vocabulary = 2 * sizes.vocab_size * sizes.hidden_size
    whole = vocabulary + sizes.hidden_size
    used = 0
    for kind, count in sizes.layer_kinds():
        weights = kind.layer_parameters()
        whole += count * sum(weights)
        experts = weights.experts * sizes.moe_top_k // (kind.num_experts or 1)
        used += count * (weights.split + weights.whole + experts)
    assert whole / 1e9 == pytest.approx(total, abs=0.05)
    assert used / 1e9 == pytest.approx(active, abs=0.01)
    memory = MemoryModel(sizes=sizes)
    (stage,) = [memory.stage(Layout(), 0, live_tokens=0.0, row_tokens=0.0)]
    assert stage.parameters == 2 * whole


@pytest.mark.parametrize("experts", [False, True])
def test_a_gpt_as_a_hybrid_model_costs_the_same(experts: bool) -> None:
    gpt = ModelSizes(
        num_layers=4,
        hidden_size=64,
        ffn_hidden_size=128 if experts else 96,
        num_attention_heads=4,
        num_query_groups=2,
        vocab_size=100,
        qk_layernorm=True,
        qkv_bias=True,
        num_experts=4 if experts else None,
        moe_ffn_hidden_size=96,
        moe_shared_ffn_hidden_size=32 if experts else None,
        moe_shared_gate=experts,
        moe_first_dense_layers=1 if experts else 0,
    )
    pattern = "*-*E*E*E" if experts else "*-" * 4
    hybrid = replace(gpt, num_layers=8, hybrid_layer_pattern=pattern, moe_first_dense_layers=0)
    layout = Layout(tp=2, sequence_parallel=True)
    speed = GpuSpeed(peak_tflops=1.0)
    costs = [cost_from_sizes(sizes, layout, speed, mean_length=100.0) for sizes in (gpt, hybrid)]
    for name in ("fixed", "per_token", "per_token_sq", "backward_ratio"):
        assert getattr(costs[0], name) == pytest.approx(getattr(costs[1], name))
    tokens = {"live_tokens": 500.0, "row_tokens": 200.0}
    bytes_of = [MemoryModel(sizes=s).stage(layout, 0, **tokens) for s in (gpt, hybrid)]
    assert bytes_of[0].parameters == bytes_of[1].parameters
    assert bytes_of[0].activations == pytest.approx(bytes_of[1].activations)
    carried = {**tokens, "carried": Carried(100.0, 100.0, 0.0, 1.0)}
    bytes_of = [MemoryModel(sizes=s).stage(layout, 0, **carried) for s in (gpt, hybrid)]
    assert bytes_of[0].activations == pytest.approx(bytes_of[1].activations)


def test_work_of_linear_layers_of_qwen3_next() -> None:
    """67 MFLOP per token in projections and 5.8 in the scan; the state is as large as the keys of
    1,048 tokens."""
    kinds = {kind.parts: kind for kind, _ in config_of(QWEN3_NEXT).model.layer_kinds()}
    scan = 32 * (2 * 64 * (2 * 128 + 2 * 128 + 128) + 6 * 128 * 128)
    convolution = 2 * 4 * (2 * 2048 + 4096)
    projections = 2 * 2048 * (2 * 2048 + 2 * 4096 + 64 + 4096)
    assert kinds["G"].layer_flops_per_token() == projections + convolution + scan
    assert projections / 1e6 == pytest.approx(67, abs=0.5)
    assert scan / 1e6 == pytest.approx(5.8, abs=0.05)
    # Queries are projected with a gate each.
    attention = 2 * 2048 * (2 * 4096 + 4096 + 2 * 512)
    assert kinds["*"].layer_flops_per_token() == attention
    memory = MemoryModel(sizes=config_of(QWEN3_NEXT).model)
    saved = memory.saved(Layout(), kinds["G"])
    assert saved.carried_state == 32 * 128 * 128 * 4 + 3 * 8192 * 2
    attention_saved = memory.saved(Layout(), kinds["*"])
    keys = attention_saved.carried_token
    assert saved.carried_state / keys == pytest.approx(1048, abs=0.5)
    assert saved.carried_token == 0
    assert attention_saved.carried_state == 0


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("layout", [Layout(), Layout(cp=2), Layout(tp=2, sequence_parallel=True)])
def test_the_shortest_piece_holds_as_much_as_its_states(
    recompute: Recompute, layout: Layout
) -> None:
    """A piece of so many tokens holds in activations what its states add, and one token less does
    not. Context parallelism splits both."""
    model = MemoryModel(sizes=replace(UNEVEN, recompute=recompute))
    least = model.least_piece(layout)
    assert least is not None

    def held(tokens: float, states: float) -> int:
        tokens, states = tokens / layout.cp, states / layout.cp
        own = {"live_tokens": tokens, "row_tokens": 0, "carried": Carried(states=states)}
        return model.stage(layout, 0, **own).activations

    # On one stage, which has all layers; embedding and rotary tables are no activations of layers.
    beside = least * (8 + model.saved(layout).rotary_table) / layout.cp
    states = held(0, 1)
    assert states > 0
    assert held(least, 0) - beside >= states - 2
    assert held(least - 1, 0) < states + beside


def test_models_without_recurrent_layers_have_no_shortest_piece() -> None:
    gpt = replace(UNEVEN, hybrid_layer_pattern="*-*-")
    for sizes in (gpt, replace(gpt, hybrid_layer_pattern=None)):
        assert MemoryModel(sizes=sizes).least_piece(Layout()) is None


def test_stages_with_other_shares_of_attention_have_two_weights() -> None:
    cost = CostModel.from_model(UNEVEN, layout=PP2, flops_per_gpu=1e9, mean_length=50.0)
    assert cost.square_factors is not None
    assert cost.stage_weights is not None
    # All attention is on the first of two stages, and none on the second.
    assert cost.stage_weights[0] * cost.square_factors[0] == pytest.approx(2)
    assert cost.square_factors[1] == 0
    row = {"row_tokens": 30, "tokens_sq": 500, "num_samples": 2}
    stages = [
        weight * cost.forward_seconds(PP2, **row, square_factor=factor)
        for weight, factor in zip(cost.stage_weights, cost.square_factors, strict=True)
    ]
    linear = [
        sum(k.layer_flops_per_token() * n for k, n in UNEVEN.layer_kinds(f, 2)) for f in (0, 2)
    ]
    linear[0] += 64
    linear[1] += 2 * 64 * 100
    assert stages[0] == pytest.approx((30 * linear[0] + 500 * 4 * 2 * 16) / 1e9)
    assert stages[1] == pytest.approx(30 * linear[1] / 1e9)
    assert CostModel.from_json(cost.to_json()) == cost


def test_alike_stages_have_one_weight() -> None:
    twice = replace(UNEVEN, num_layers=8, hybrid_layer_pattern="*-M-*-M-")
    assert twice.chunk_weights(PP2, 50.0)[1] is None
    assert twice.chunk_weights(Layout(pp=4), 50.0)[1] is not None
    nemotron = config_of(NEMOTRON3)
    cost = nemotron.cost_model(nemotron.layout.to_layout(32))
    assert cost.square_factors is not None
    assert cost.stage_weights is not None
    squares = [w * f for w, f in zip(cost.stage_weights, cost.square_factors, strict=True)]
    # Attention layers by stage are 2, 1, 2 and 1.
    assert squares == pytest.approx([4 / 3, 2 / 3, 4 / 3, 2 / 3])
    qwen = config_of(QWEN3_NEXT)
    assert qwen.cost_model(qwen.layout.to_layout(64)).square_factors is None


def test_pieces_keep_a_state_each() -> None:
    memory = MemoryModel(sizes=UNEVEN)
    tokens = {"live_tokens": 500.0, "row_tokens": 200.0}

    def activations(stage: int, carried: Carried) -> int:
        return memory.stage(PP2, stage, **tokens, carried=carried).activations

    base = Carried(put_off_tokens=1e-9)
    one = Carried(put_off_tokens=1e-9, states=1.0)
    # The state in fp32 and 3 tokens of the convolution in bf16, with their gradients.
    state = 8 * 16 * 32 * 4 + 3 * (8 * 16 + 2 * 2 * 32) * 2
    assert activations(1, one) - activations(1, base) == pytest.approx(2 * state, abs=1)
    assert activations(0, one) == activations(0, base)


@pytest.mark.parametrize(
    ("sizes", "layout", "widest"),
    [
        (UNEVEN, Layout(tp=2), 4),
        (UNEVEN, Layout(tp=2, cp=4), 1),
        (UNEVEN, Layout(tp=4), 0),
        (replace(UNEVEN, mamba_num_heads=12, mamba_num_groups=3), Layout(), 1),
        (GATED_DELTA, Layout(cp=2), 1),
        (GATED_DELTA, Layout(tp=2, cp=2), 0),
        (replace(UNEVEN, hybrid_layer_pattern="*-*-"), Layout(cp=8), None),
    ],
)
def test_widths_of_rows(sizes: ModelSizes, layout: Layout, widest: int | None) -> None:
    assert sizes.max_width(layout) == widest


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hybrid_layer_pattern": "*-"}, "has 2 letters and num_layers is 4"),
        ({"hybrid_layer_pattern": "*-x-"}, "has 'x'; set letters of GM"),
        ({"hybrid_layer_pattern": "G-*-"}, "has layers G, so linear_num_key_heads must be set"),
        ({"hybrid_layer_pattern": "*EM-"}, "has layers E, so num_experts must be set"),
        ({"mamba_num_heads": None}, "has layers M, so mamba_num_heads must be set"),
    ],
)
def test_patterns_that_do_not_fit(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(UNEVEN, **keys)  # type: ignore[arg-type]
