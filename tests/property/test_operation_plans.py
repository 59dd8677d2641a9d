"""Random steps with pieces and split backwards keep the invariants, and are not slower."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megapack import CostModel, Plan, Policy, check_plan
from megapack.pipeline.simulator import simulate_planned
from tests import strategies
from tests.strategies import planned, replanned

pytestmark = pytest.mark.property


@st.composite
def inputs(draw: st.DrawFn) -> tuple[list[int], dict[str, Any]]:
    choose = strategies.chooser(draw)
    lengths, arguments = strategies.long_and_short(draw)
    return lengths, {
        **arguments,
        "layout": strategies.layout(choose, pp=(1, 2, 2, 3), vpp=(1, 1, 2)),
        "cost": strategies.cost(choose, weight_ratio=(0.0, 1.0, 1.3)),
        "policy": strategies.policy(
            choose,
            split_samples=("auto", "auto", "off"),
            backward=("split", "split", "joint"),
            context_parallel=("fixed", "fixed", "fixed", "dynamic"),
            count_rule=("legal", "legal", "multiple", "per_rank"),
            row_shape=("planned", "planned", "planned", "uniform"),
            unreachable=("pad", "pad", "drop", "error"),
            max_live_tokens_per_gpu=(None, *range(200, 3001, 100)),
        ),
    }


@given(inputs())
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_pieces_and_orders_keep_the_invariants_and_are_never_slower(
    drawn: tuple[list[int], dict[str, Any]],
) -> None:
    lengths, arguments = drawn
    policy = arguments["policy"]
    cost = arguments["cost"]
    assert isinstance(policy, Policy)
    assert cost is None or isinstance(cost, CostModel)
    plan = planned(lengths, arguments)
    whole = dataclasses.replace(policy, split_samples="off", backward="joint")
    without = planned(lengths, {**arguments, "policy": whole})
    if plan is None:
        assert without is None or policy.split_samples == "auto"
        return
    check_plan(plan, lengths)
    replanned(plan, lengths, arguments)
    for number, step in enumerate(plan.steps):
        simulation = simulate_planned(plan, step, cost)
        cap = policy.max_live_tokens_per_gpu
        assert cap is None or simulation.peak_live_tokens <= cap
        if policy.unreachable != "pad":
            assert all(mb.samples for mb in step.microbatches)
        if without is None or _is_over_budget(without) or plan.row_lengths:
            continue
        fixed = simulate_planned(without, without.steps[number], cost)
        assert simulation.makespan <= fixed.makespan * (1 + 1e-9)


def _is_over_budget(plan: Plan) -> bool:
    """Whether a row is over the budget, which split_samples="auto" cuts."""
    rows = (mb for step in plan.steps for mb in step.microbatches)
    return any(mb.padded_tokens > plan.capacity * mb.width for mb in rows)
