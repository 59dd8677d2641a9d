"""`CostModel`: its formula, its file, the model from sizes, and the fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megapack import ConfigError, CostModel, DataError, Layout, Measurement, ModelSizes

pytestmark = pytest.mark.unit

SIZES: dict[str, Any] = {
    "num_layers": 32,
    "hidden_size": 4096,
    "ffn_hidden_size": 11008,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}


def test_forward_seconds_of_a_chunk() -> None:
    cost = CostModel(fixed=1.0, per_token=2.0, per_token_sq=0.5, per_sample=4.0)
    layout = Layout(pp=2, vpp=2, cp=2)
    seconds = cost.forward_seconds(layout, row_tokens=8, tokens_sq=34, num_samples=2)
    assert seconds == 1 + (16 + 17 + 8) / 8


@pytest.mark.parametrize(
    "fields",
    [
        {"fixed": -1.0},
        {"per_token": float("nan")},
        {"per_token_sq": "1"},
        {"backward_ratio": float("inf")},
        {"per_sample": True},
        {"stage_weights": (1.0, 2.0)},
        {"stage_weights": ()},
    ],
)
def test_invalid_fields_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        CostModel(**fields)


def test_from_json_is_the_inverse_of_to_json() -> None:
    cost = CostModel(fixed=0.1, per_token=1 / 3, stage_weights=(0.5, 1.5), p2p=1e-5)
    assert CostModel.from_json(cost.to_json()) == cost
    for text in ("", "[]", '{"per_tokens": 1}', '{"fixed": "x"}'):
        with pytest.raises(ConfigError):
            CostModel.from_json(text)


def test_the_cost_of_a_7b_model_follows_its_parameters() -> None:
    sizes = ModelSizes(**SIZES)
    layout = Layout(tp=2, pp=4, vpp=2)
    cost = CostModel.from_model(sizes, layout=layout, flops_per_gpu=1e14)
    # Two operations per parameter and token; 6.6e9 parameters without the embedding.
    assert cost.per_token * 2e14 == pytest.approx(2 * 6.6e9, rel=0.01)
    # The 7B of the planner's table: a squared token costs 1/49152 of a token.
    assert cost.per_token_sq / cost.per_token == pytest.approx(1 / 49152, rel=0.05)
    weights = cost.weights_for(layout)
    assert sum(weights) / 8 == pytest.approx(1)
    assert weights[-1] > 1 > weights[1]
    assert weights[0] > weights[1]


def test_only_the_chosen_experts_cost_operations() -> None:
    dense = ModelSizes(**SIZES)
    moe = ModelSizes(**{**SIZES, "ffn_hidden_size": 1376}, num_experts=64, experts_per_token=8)
    difference = moe.layer_flops_per_token() - dense.layer_flops_per_token()
    assert difference == 2 * 4096 * 64
    grouped = ModelSizes(**SIZES, num_query_groups=8)
    assert grouped.layer_flops_per_token() < dense.layer_flops_per_token()
    with pytest.raises(ConfigError, match="num_layers=32"):
        dense.stage_weights(Layout(pp=3), 1000)
    with pytest.raises(ConfigError, match="num_experts"):
        ModelSizes(**SIZES, num_experts=0)


def test_fit_recovers_the_measured_model() -> None:
    layout = Layout(pp=2, vpp=2)
    true = CostModel(
        fixed=2e-3, per_token=1e-6, per_token_sq=3e-11, per_sample=1e-4, backward_ratio=2.2
    )
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(40):
        lengths = rng.integers(10, 20000, rng.integers(1, 30))
        row_tokens = int(lengths.sum())
        tokens_sq = int((lengths**2).sum())
        seconds = true.forward_seconds(
            layout, row_tokens=row_tokens, tokens_sq=tokens_sq, num_samples=lengths.size
        )
        rows.append(Measurement(row_tokens, tokens_sq, lengths.size, seconds, 2.2 * seconds))
    found = CostModel.fit(rows, layout=layout)
    assert found.fit_error == pytest.approx(0, abs=1e-6)
    for name in ("fixed", "per_token", "per_token_sq", "per_sample", "backward_ratio"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=1e-4), name
    noisy = [
        row._replace(forward_seconds=row[3] * f)
        for row, f in zip(rows, [0.9, 1.1] * 20, strict=True)
    ]
    assert 0.02 < (CostModel.fit(noisy, layout=layout).fit_error or 0) < 0.15
    for bad in ([], [Measurement(1, 1, 1, 0.0)]):
        with pytest.raises(DataError):
            CostModel.fit(bad)
