"""Measured seconds become a cost model, and the planner reads the model's file."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapack import ConfigError, CostModel, DataError, Layout, Measurement
from megapack.config import dump_yaml
from megapack.config.cost_file import read_cost
from megapack.cost import StageLayers
from megapack.cost.assumed import GpuSpeed, cost_from_sizes
from megapack.cost.calibration import Calibration, Origin
from megapack.cost.sizes import ModelSizes
from megapack.job.config.sections import LayoutConfig, ModelConfig, PlanConfig, TrainConfig
from megapack.plan import check_plan
from tools.benching.calibration_rows import (
    fit_whole_model,
    grid,
    on_one_stage,
    relative_errors,
    stage_weights,
)

pytestmark = pytest.mark.unit

LAYOUT = Layout(pp=2, vpp=2, cp=2)
ONE_STAGE = Layout(cp=2)
COST = CostModel(
    fixed=1e-3, per_token=1 / 3e6, per_token_sq=3e-11, per_sample=1e-5, backward_ratio=2.2
)


def seconds_of_grid(cost: CostModel, backward_ratio: float) -> list[Measurement]:
    """Measurements of the grid's rows, as `cost` predicts them on one stage."""
    rows = []
    for lengths in grid(16384, 8192, 2):
        row_tokens = sum(lengths)
        tokens_sq = sum(n**2 for n in lengths)
        num_samples = len(lengths)
        forward = cost.forward_seconds(
            ONE_STAGE, row_tokens=row_tokens, tokens_sq=tokens_sq, num_samples=num_samples
        )
        backward = backward_ratio * forward
        rows.append(Measurement(row_tokens, tokens_sq, num_samples, forward, backward))
    return rows


def test_a_written_cost_model_is_read_back_exactly(tmp_path: Path) -> None:
    cost = CostModel(
        fixed=1e-17,
        per_token=1 / 3,
        stage_weights=(0.5, 1.5),
        cp_overhead=1 / 7,
        fit_error=0.04,
    )
    origin = Origin(
        command="calibrate 'a: b'",
        date="2026-01-31",
        device="a GPU",
        versions="torch 2",
        num_rows=22,
        worst_fit_error=0.1,
    )
    path = tmp_path / "cost.yaml"
    path.write_text(dump_yaml(Calibration(cost=cost, origin=origin)), encoding="utf-8")
    found = read_cost(path, Layout(pp=2))
    assert found == cost
    assert found.fit_error == cost.fit_error
    plan = PlanConfig(max_tokens_per_gpu=8, cost_model=str(path))
    assert TrainConfig(name="file", plan=plan).cost_model(Layout(pp=2)) == cost


def test_without_a_file_the_cost_model_comes_from_the_sizes() -> None:
    config = TrainConfig(
        name="sizes",
        plan=PlanConfig(max_tokens_per_gpu=8),
        model=ModelConfig(num_layers=4, hidden_size=128, vocab_size=1000, dtype="bf16"),
    )
    layout = Layout(pp=2)
    cost = config.cost_model(layout)
    assert cost == config.cost_from_sizes(layout, GpuSpeed.of("cuda", "bf16"))
    assert config.cost_basis.startswith("from the model's sizes; assumed: 65% of 989.4 TFLOPS")
    # Two of four layers on each stage; the head on the last costs 4/3 of its operations.
    sizes = config.model
    kind = sizes.last_kind
    # Attention's kernels reach 0.35 of the peak where products reach 0.65.
    squares = 0.65 / 0.35 * 1024 * kind.layer_flops_per_token_sq()
    layers = 2 * (kind.layer_flops_per_token() + squares)
    head = 4 / 3 * 2 * 128 * 1000
    assert cost.weights_for(layout)[1] / cost.weights_for(layout)[0] == pytest.approx(
        (layers + head) / (layers + 128)
    )
    assert cost.fixed == pytest.approx(2 * 150e-6)
    on_cpu = replace(config, device="cpu").cost_model(layout)
    assert on_cpu.per_token > 5000 * cost.per_token
    full = replace(config, model=replace(config.model, recompute="full")).cost_model(layout)
    assert (cost.backward_ratio, full.backward_ratio) == (2, 3)


def test_a_measured_cost_model_replaces_the_sizes(tmp_path: Path) -> None:
    path = tmp_path / "cost.yaml"
    path.write_text("cost: {per_token: 2}", encoding="utf-8")
    plan = PlanConfig(max_tokens_per_gpu=8, cost_model=str(path))
    config = TrainConfig(name="file", plan=plan)
    assert config.cost_model(Layout()) == CostModel(per_token=2.0)
    assert config.cost_basis == f"of the cost model {path}"


@given(st.integers(1, 20000), st.integers(1, 20000), st.sampled_from([1, 2, 16, 96]))
def test_rows_of_the_grid_fit_into_the_budget(budget: int, longest: int, unit: int) -> None:
    if min(budget, longest) < unit:
        with pytest.raises(ConfigError, match=f"alignment {unit}"):
            grid(budget, longest, unit)
        return
    rows = grid(budget, longest, unit)
    assert rows == grid(budget, longest, unit)
    assert max(map(sum, rows)) == budget // unit * unit
    for row in rows:
        assert all(0 < n <= longest and n % unit == 0 for n in row)


def test_the_whole_models_seconds_are_split_over_chunks() -> None:
    found = fit_whole_model(seconds_of_grid(COST, 2.2), LAYOUT)
    assert found.fixed == pytest.approx(COST.fixed / 4)
    for name in ("per_token", "per_token_sq", "per_sample", "backward_ratio"):
        assert getattr(found, name) == pytest.approx(getattr(COST, name), rel=1e-4), name
    row = {"row_tokens": 4096, "tokens_sq": 4096 * 512, "num_samples": 8}
    assert 4 * found.forward_seconds(LAYOUT, **row) == pytest.approx(
        COST.forward_seconds(ONE_STAGE, **row)
    )
    assert on_one_stage(found, LAYOUT).fixed == pytest.approx(COST.fixed)


def test_forward_and_backward_are_fitted_together() -> None:
    """If backwards are not proportional to forwards, the sum of both is still fitted exactly."""
    rows = seconds_of_grid(COST, 2.0)
    other = [
        row._replace(
            forward_seconds=row.forward_seconds * (1 + part),
            backward_seconds=row.forward_seconds * (2 - part),
        )
        for row, part in zip(rows, [0.2, -0.2] * (len(rows) // 2), strict=True)
    ]
    cost = fit_whole_model(other, ONE_STAGE)
    forward, both = relative_errors(cost, ONE_STAGE, other)
    assert both == pytest.approx([0.0] * len(rows), abs=1e-6)
    assert cost.fit_error == pytest.approx(0.0, abs=1e-6)
    assert 0.1 < max(map(abs, forward)) < 0.3
    with pytest.raises(DataError):
        fit_whole_model([], ONE_STAGE)


def test_cp_costs_what_as_many_data_parallel_ranks_of_a_row_cost() -> None:
    def seconds(width: int, **layout: int) -> float:
        sizes = ModelSizes(num_layers=4, num_attention_heads=8)
        on = Layout(pp=2, **layout)
        cost = cost_from_sizes(sizes, on, GpuSpeed(peak_tflops=100.0), mean_length=4096)
        return cost.forward_seconds(
            on, row_tokens=9000, tokens_sq=4096**2, num_samples=3, width=width
        )

    wide = seconds(4, dp=4)
    assert seconds(1, cp=4) == pytest.approx(wide)
    assert seconds(2, dp=2, cp=2) == pytest.approx(wide)
    assert seconds(1, dp=4) / 4 < 0.99 * wide


def test_sizes_give_what_rows_over_several_ranks_cost_more() -> None:
    sizes = ModelSizes(
        num_layers=4,
        hidden_size=2560,
        ffn_hidden_size=9728,
        num_attention_heads=32,
        num_query_groups=8,
        kv_channels=128,
        vocab_size=1,
    )
    speed = GpuSpeed(peak_tflops=1000.0)
    found = cost_from_sizes(sizes, Layout(pp=2, dp=16), speed, mean_length=4096)
    # A layer: 4 KiB of keys and values at 300 GB/s, 50 between nodes of 8 GPUs; 650 tokens of
    # attention at 350 TFLOPS.
    kernels = 650 * 32 * (128 + 128) / 350e12
    each = [4 * (4096 / gbs + kernels) / found.per_token for gbs in (300e9, 300e9, 300e9, 50e9)]
    assert found.cp_overheads == pytest.approx((each[0], 3 * each[1], 7 * each[2], 15 * each[3]))
    assert found.over_ranks(16)[1] == pytest.approx(1 + 15 * each[3])
    assert found.cp_fixed == pytest.approx(2 * 40e-6)
    # Without attention nothing is exchanged.
    mamba = replace(
        sizes,
        hybrid_layer_pattern="M-M-",
        num_layers=4,
        mamba_num_heads=8,
        mamba_head_dim=64,
        mamba_state_dim=16,
        mamba_num_groups=2,
    )
    found = cost_from_sizes(mamba, Layout(pp=2, dp=2), speed, mean_length=4096)
    assert (found.cp_overheads, found.cp_fixed) == ((0.0,), 0.0)


def test_the_last_chunk_gets_the_seconds_outside_layers() -> None:
    # A layer takes 1 s, the head 4 s: chunks of 2, 2, 2 and 6 s.
    even = StageLayers.even(8, pp=4)
    weights = stage_weights(12.0, 6.0, num_few=2, stage_layers=even)
    assert weights == pytest.approx((2 / 3, 2 / 3, 2 / 3, 2.0))
    assert stage_weights(8.0, 2.0, num_few=2, stage_layers=even) == pytest.approx((1.0,) * 4)
    with pytest.raises(DataError, match=r"8 layers took 1 s and 2 took 1.1 s.*too busy to measure"):
        stage_weights(1.0, 1.1, num_few=2, stage_layers=even)
    # Chunks of 0, 3, 4 and 1 + 4 s.
    uneven = StageLayers((0, 3, 4, 1), pp=2)
    weights = stage_weights(12.0, 6.0, num_few=2, stage_layers=uneven)
    assert weights == pytest.approx((0.0, 1.0, 4 / 3, 5 / 3))


def test_long_rows_are_measured_over_several_ranks_too(
    repo_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(repo_root / "tools"))
    calibrate = importlib.import_module("calibrate")
    world_size = 8
    monkeypatch.setattr(calibrate.dist, "get_world_size", lambda: world_size)
    config = TrainConfig(
        name="wide",
        plan=PlanConfig(max_tokens_per_gpu=1000),
        layout=LayoutConfig(pp=2, cp=2),
        model=ModelConfig(max_position_embeddings=1000),
    )
    job = calibrate.Job(config)
    assert (job.layout.dp, job.target) == (4, Layout(pp=2, cp=2))
    step = job.grid(None, job.layout.widths)
    check_plan(step.plan, step.batch.lengths)
    on_ranks = [
        [(row.row_tokens, row.tokens_sq, row.width) for row in rank]
        for rank in step.plan.steps[0].ranks
    ]
    assert on_ranks == [on_ranks[0]] * 4
    alone, over_2, over_4 = (
        {row[:2] for row in on_ranks[0] if row[2] == width} for width in (1, 2, 4)
    )
    assert over_2 == over_4 == {row for row in alone if row[0] >= 1000}
    trace = calibrate.Trace([10, 20, 30, 900], [5, 5, 5, 5])
    copies = job.planned(trace)
    check_plan(copies.plan, copies.batch.lengths)
    assert copies.plan.counts.num_samples == 16
    world_size = 12
    with pytest.raises(ConfigError, match="12 ranks with tp \\* cp = 2"):
        calibrate.Job(config)
