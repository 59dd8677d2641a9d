"""The judge of measured seconds: its tables, its recurrence, and a race of plans."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from megapack import CostModel, Layout, MicroBatch, Policy, StepPlan, build_dp_schedule
from megapack.pipeline.simulator import simulate_planned
from tools.bench_measured import EVERYTHING, changes, fitted_cost, race, tables
from tools.benching import measured_tables
from tools.benching.measured_seconds import (
    MeasuredSeconds,
    RowSeconds,
    attention_seconds,
    collective,
    product_seconds,
    step_seconds,
)
from tools.benching.planner_cases import Case
from tools.benching.planner_costs import MODELS
from tools.benching.planner_peers import BASELINES

pytestmark = pytest.mark.unit

DYNAMIC = Policy(context_parallel="dynamic")
ALL = Policy(context_parallel="dynamic", split_samples="auto", backward="split")
SIZES = replace(MODELS["Qwen3-8B"], num_layers=4)
LENGTHS = np.array([9000, 300, 4100, 700, 1500, 2600, 120, 3900, 900, 1900, 5200, 640])


@dataclass(frozen=True)
class ModelSeconds:
    """A judge by a cost model, as megapack's simulator is one."""

    cost: CostModel
    layout: Layout

    def row(self, row: MicroBatch) -> RowSeconds:
        cost, layout = self.cost, self.layout
        tokens, samples, width = row.row_tokens, len(row.samples), row.width
        weights = np.array(cost.weights_for(layout))
        forward = [
            cost.forward_seconds(
                layout,
                row_tokens=tokens,
                tokens_sq=row.tokens_sq,
                num_samples=samples,
                width=width,
                square_factor=factor,
            )
            for factor in cost.factors_for(layout)
        ]
        apart = cost.weight_seconds(layout, row_tokens=tokens, num_samples=samples, width=width)
        forward_C = weights * np.array(forward)
        backward_C = cost.backward_ratio * forward_C
        return RowSeconds(forward_C, backward_C, np.minimum(weights * apart, backward_C))

    def p2p(self, step: StepPlan) -> float:
        return self.cost.p2p


@pytest.mark.parametrize(
    ("layout", "policy"),
    [
        (Layout(dp=2, pp=2, vpp=2), Policy()),
        (Layout(dp=4, pp=2), DYNAMIC),
        (Layout(dp=4, pp=2, vpp=2), ALL),
        (Layout(dp=4, pp=2, ep=4), ALL),
    ],
    ids=str,
)
def test_seconds_of_a_cost_model_are_those_of_the_simulator(layout: Layout, policy: Policy) -> None:
    chunks = layout.num_chunks
    cost = CostModel(
        fixed=1e-3,
        per_token=2e-6,
        per_token_sq=1e-10,
        per_sample=1e-5,
        p2p=2e-4,
        cp_fixed=1e-4,
        stage_weights=(0.8,) * (chunks // 2) + (1.2,) * (chunks - chunks // 2),
        square_factors=(0.5, *(1.0,) * (chunks - 1)),
        weight_ratio=0.9,
    )
    plan = build_dp_schedule(
        LENGTHS, layout=layout, max_tokens_per_gpu=9000, cost=cost, policy=policy
    )
    (step,) = plan.steps
    assert policy != ALL or step.orders
    assert policy == Policy() or any(row.width > 1 for row in step.microbatches)
    expected = simulate_planned(plan, step, cost).makespan
    assert step_seconds(step, ModelSeconds(cost, layout)) == pytest.approx(expected, rel=1e-12)


def test_tables_are_met_at_their_points_and_continued_beyond() -> None:
    def forward(length: int, ranks: int, heads: int, samples: int = 1) -> float:
        spans = np.array([(0, length)] * samples)
        return 1e6 * attention_seconds(spans, heads, ranks)[0]

    assert forward(4096, 1, 32, samples=4) == pytest.approx(4 * 407)
    assert forward(65536, 8, 8) == pytest.approx(3409)
    # A short document alone leaves the GPU unfilled, and eight of them do not.
    assert forward(512, 1, 32) == pytest.approx(37.8)
    assert forward(512, 1, 32, samples=8) == pytest.approx(8 * 10.4)
    # 16 ranks save as much of what 8 take as 8 save of what 4 take, and at most half.
    assert forward(65536, 16, 32) == pytest.approx(12836 / 2)
    assert forward(8192, 16, 32) == pytest.approx(356 * 356 / 558)
    # Pieces take what the sample takes.
    pieces = [attention_seconds(np.array([span]), 32, 1) for span in ((0, 8192), (8192, 16384))]
    whole = attention_seconds(np.array([(0, 16384)]), 32, 1)
    assert sum(piece[0] for piece in pieces) == pytest.approx(whole[0], rel=0.2)
    assert 2.8 < whole[1] / whole[0] < 2.9
    assert collective(measured_tables.GATHER_US, 2.0**26, 8, 8) == pytest.approx(207e-6)
    # Beyond a node each GPU has one adapter.
    assert collective(measured_tables.GATHER_US, 2.0**26, 8, 16) == pytest.approx(
        64e-6 + 2.0**26 * 7 / 8 / 48e9
    )
    per_token = product_seconds(4096, measured_tables.MATRIX_FLOPS) / 4096
    assert per_token == pytest.approx(0.19e-6 / 3)


def test_a_row_over_ranks_and_a_short_row() -> None:
    judge = MeasuredSeconds(SIZES, Layout(dp=16, pp=2), LENGTHS)
    spans = np.array([(0, 32768)])
    alone, wide, between = (judge.seconds(32768, spans, width).forward for width in (1, 8, 16))
    # Exchanges and shorter products cost more than a rank's share, between nodes still more.
    assert alone[0] / 8 < wide[0] < alone[0] / 5
    assert between[0] > 0.6 * wide[0]
    # The last chunk has the head.
    assert alone[1] > alone[0]
    # A host that launches slowly is the limit of short rows.
    short = judge.seconds(64, np.array([(0, 64)])).forward
    assert short[0] == pytest.approx(2 * judge.host)
    noisy = replace(judge, noise=0.2)
    assert 0.8 <= noisy.seconds(32768, spans).forward[0] / alone[0] <= 1.2
    assert noisy.seconds(32768, spans).forward[0] == noisy.seconds(32768, spans).forward[0]


def test_a_race_of_a_cell_and_what_changed() -> None:
    layout = Layout(dp=4, pp=2)
    cost = CostModel(fixed=1e-3, per_token=2e-6, per_token_sq=1e-10)
    case = Case("drawn", LENGTHS, 9000, "dp4 pp2", layout, "small", cost)
    judge = MeasuredSeconds(SIZES, layout, LENGTHS)
    cell = race(case, judge, BASELINES)
    assert set(cell) >= {f"fitted, {EVERYTHING}", "tokens, megapack", "peer, next_fit"}
    assert all(seconds > 0 for seconds in cell.values())
    fitted = fitted_cost(judge, 9000)
    assert fitted.fit_error is not None
    assert fitted.fit_error < 0.2
    name = "dp4 pp2, small, 12 samples, drawn"
    lines = list(tables({name: cell}))
    ratio = cell[f"fitted, {EVERYTHING}"] / min(cell[f"peer, {peer}"] for peer in BASELINES)
    assert any(line.startswith("| all | fitted |") and f"{ratio:.3f}" in line for line in lines)
    slower = {plan: 1.01 * seconds for plan, seconds in cell.items()}
    assert f"| fitted, {EVERYTHING} | 1.010 | 1.010 | {name} |" in changes(
        {name: cell}, {name: slower}
    )
