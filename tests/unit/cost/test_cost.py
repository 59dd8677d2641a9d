"""`CostModel`: its formula, its file, the model from sizes, and the fit."""

from __future__ import annotations

from dataclasses import replace
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


def test_a_row_over_several_ranks_takes_its_share_and_the_overhead() -> None:
    cost = CostModel(fixed=1.0, per_token=2.0, per_token_sq=0.5, cp_overhead=0.5, cp_fixed=3.0)
    layout = Layout(dp=4, pp=2, cp=2)
    row = {"row_tokens": 64, "tokens_sq": 256, "num_samples": 1}
    assert cost.forward_seconds(layout, **row) == 1 + (128 + 128) / 4
    # Each further rank adds to what tokens cost, and nothing to what their squares cost.
    assert cost.forward_seconds(layout, **row, width=2) == 1 + 3 + (1.5 * 128 + 128) / 8
    assert cost.forward_seconds(layout, **row, width=4) == 1 + 3 + (2.5 * 128 + 128) / 16
    assert cost.share_of_rank(layout, 1) == 1 / 4
    assert CostModel().cp_overhead == 0.05


def test_from_json_is_the_inverse_of_to_json() -> None:
    cost = CostModel(
        fixed=0.1, per_token=1 / 3, stage_weights=(0.5, 1.5), p2p=1e-5, cp_overhead=1 / 7
    )
    assert CostModel.from_json(cost.to_json()) == cost
    # Files from before rows could lie over several ranks.
    assert CostModel.from_json('{"per_token": 1}').cp_overhead == CostModel.cp_overhead
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


WIDE = CostModel(fixed=2e-3, per_token=1e-6, per_token_sq=3e-11, cp_overhead=0.12, cp_fixed=1e-3)


def measured(cost: CostModel, *widths: int) -> list[Measurement]:
    """The same rows of 1 to 32 samples over each of these widths, as a cost model predicts them."""
    layout = Layout(dp=4)
    rows = []
    for width in widths:
        for row_tokens in (2048, 8192, 32768):
            for num_samples in (1, 4, 32):
                tokens_sq = row_tokens**2 // num_samples
                seconds = cost.forward_seconds(
                    layout,
                    row_tokens=row_tokens,
                    tokens_sq=tokens_sq,
                    num_samples=num_samples,
                    width=width,
                )
                row = (row_tokens, tokens_sq, num_samples, seconds, 2 * seconds, width)
                rows.append(Measurement(*row))
    return rows


@pytest.mark.parametrize("overhead", [0.0, 0.12, 1.5])
def test_rows_over_several_ranks_give_the_overhead(overhead: float) -> None:
    cost = replace(WIDE, cp_overhead=overhead)
    found = CostModel.fit(measured(cost, 1, 2, 4))
    assert found.cp_overhead == pytest.approx(overhead, abs=1e-6)
    assert found.cp_fixed == pytest.approx(cost.cp_fixed, rel=1e-6)
    alone = CostModel.fit(measured(cost, 1))
    assert found.cp_overheads == pytest.approx((overhead, 3 * overhead), abs=1e-6)
    others = replace(
        found, cp_overhead=alone.cp_overhead, cp_fixed=alone.cp_fixed, cp_overheads=None
    )
    assert others == alone, "wide rows change other numbers"
    # Rows that were measured over several ranks only.
    others = [row._replace(row_tokens=row.row_tokens + 8) for row in measured(cost, 2)]
    found = CostModel.fit([*measured(cost, 1), *others])
    assert found.cp_overhead == pytest.approx(overhead, abs=0.02)


def test_widths_have_overheads_of_their_own() -> None:
    # Eight ranks are on two nodes. Sixteen, which are not measured, go on as eight.
    cost = replace(WIDE, cp_overheads=(0.1, 0.3, 2.1))
    found = CostModel.fit(measured(cost, 1, 2, 4, 8))
    assert found.cp_overheads == pytest.approx((0.1, 0.3, 2.1), rel=0.3)
    assert cost.over_ranks(8)[1] == pytest.approx(3.1)
    assert cost.over_ranks(16)[1] == pytest.approx(1 + 15 * 0.3)
    # A width between others that was not measured costs what the one before does for each rank.
    found = CostModel.fit(measured(replace(WIDE, cp_overhead=0.12), 1, 2, 8))
    assert found.cp_overheads == pytest.approx((0.12, 0.36, 0.84), abs=1e-6)


@pytest.mark.parametrize("given", [(), (0.7, 1.0), (1.0, 0.0), None])
def test_a_range_of_squares_begins_with_the_model_itself(given: object) -> None:
    with pytest.raises(ConfigError, match=r"square_range=.*; set factors above 0, the first 1"):
        CostModel(per_token=1.0, square_range=given)  # type: ignore[arg-type]


def test_a_pause_of_the_machine_does_not_move_the_overhead() -> None:
    rows = measured(WIDE, 1, 2)
    slow = [
        row._replace(forward_seconds=row.forward_seconds * (9 if k % 4 == 0 else 1))
        for k, row in enumerate(rows[9:])
    ]
    assert CostModel.fit([*rows[:9], *slow]).cp_overhead == pytest.approx(0.12, abs=1e-6)


def test_weight_gradients_that_were_measured_apart_give_their_ratio() -> None:
    cost = replace(WIDE, weight_ratio=0.7)
    layout = Layout(dp=4)
    rows = [
        row._replace(
            weight_seconds=cost.weight_seconds(
                layout, row_tokens=row.row_tokens, num_samples=row.num_samples
            )
        )
        for row in measured(cost, 1)
    ]
    found = CostModel.fit(rows)
    assert found.weight_ratio == pytest.approx(0.7, rel=1e-6)
    few = [*rows[:4], *(row._replace(weight_seconds=None) for row in rows[4:])]
    assert CostModel.fit(few).weight_ratio == pytest.approx(0.7, rel=1e-6)
    without = CostModel.fit(measured(cost, 1))
    assert without.weight_ratio == CostModel.weight_ratio
    assert replace(found, weight_ratio=without.weight_ratio) == without, "other numbers change"
    # Rows of nothing but attention have no forward to compare with.
    attention = [Measurement(8, 64, 1, 1.0, 2.0, 1, 0.5), Measurement(8, 128, 1, 2.0, 4.0, 1, 0.5)]
    assert CostModel.fit(attention).weight_ratio == CostModel.weight_ratio


def test_weight_gradients_are_a_part_of_the_backward() -> None:
    for backward in (None, 1.0):
        with pytest.raises(DataError, match=r"row 0 has weight gradients of 1\.5 seconds and"):
            CostModel.fit([Measurement(8, 64, 1, 1.0, backward, 1, 1.5)])
    with pytest.raises(DataError, match="give positive, finite ones"):
        CostModel.fit([Measurement(8, 64, 1, 1.0, 2.0, 1, 0.0)])


def test_measurements_of_wide_rows_alone_are_refused() -> None:
    with pytest.raises(DataError, match="9 measurements, all of rows over several DP ranks"):
        CostModel.fit(measured(WIDE, 2))
    with pytest.raises(DataError, match="row 1 lies over 0 DP ranks"):
        CostModel.fit([*measured(WIDE, 1)[:1], Measurement(1, 1, 1, 1.0, None, 0)])
