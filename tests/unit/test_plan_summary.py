from __future__ import annotations

import numpy as np
import pytest

from megapack import CostModel, Layout, PlanError, Policy, build_dp_schedule, plan_report

pytestmark = pytest.mark.unit

COST = CostModel(fixed=2.0, per_token=1.0, per_token_sq=1e-3, p2p=0.5)


@pytest.mark.parametrize(
    "layout",
    [Layout(dp=2), Layout(dp=2, pp=4), Layout(dp=2, pp=2, vpp=3, cp=2), Layout(dp=4, pp=2, ep=4)],
)
@pytest.mark.parametrize("rule", ["legal", "per_rank"])
@pytest.mark.parametrize("forward_only", [False, True])
def test_no_plan_is_below_its_bounds(layout: Layout, rule: str, forward_only: bool) -> None:
    if layout.ep > 1 and rule == "per_rank":
        pytest.skip("experts need one M")
    rng = np.random.default_rng(0)
    lengths = np.concatenate([rng.integers(1, 400, 150), [900]])
    plan = build_dp_schedule(
        lengths,
        layout=layout,
        max_tokens_per_gpu=1000,
        cost=COST,
        num_steps=2,
        policy=Policy(count_rule=rule),  # type: ignore[arg-type]
        forward_only=forward_only,
    )
    report = plan_report(plan, lengths, COST)
    assert len(report.steps) == 2
    assert str(report).startswith("step 0: rows ")
    for step in report.steps:
        assert step.num_rows >= step.num_rows_bound >= 1
        assert step.imbalance >= step.imbalance_bound - 1e-12 >= 1 - 1e-12
        assert step.makespan_seconds >= step.makespan_bound_seconds * (1 - 1e-12)
        assert step.row_tokens >= step.tokens


def test_a_plan_that_cannot_be_better_meets_its_bounds() -> None:
    lengths = [100] * 32
    plan = build_dp_schedule(lengths, layout=Layout(dp=4), max_tokens_per_gpu=400)
    (step,) = plan_report(plan, lengths).steps
    assert (step.num_rows, step.num_padding_rows) == (step.num_rows_bound, 0)
    assert step.imbalance == step.imbalance_bound == 1
    assert step.makespan_seconds == step.makespan_bound_seconds
    with pytest.raises(PlanError, match="31 lengths"):
        plan_report(plan, lengths[1:])


def test_one_huge_sample_is_its_own_bound() -> None:
    lengths = [1000, *[10] * 20]
    plan = build_dp_schedule(lengths, layout=Layout(dp=4), max_tokens_per_gpu=1000)
    (step,) = plan_report(plan, lengths).steps
    assert step.imbalance == pytest.approx(step.imbalance_bound)
    assert step.imbalance_bound == pytest.approx(1000 / 300)
