"""Random steps with the planner's freedoms keep the invariants, and are not slower than without.

The freedoms are rows over several ranks, pieces of samples, and split backwards.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megapack import CostModel, Layout, Plan, PlanError, Policy, build_dp_schedule, check_plan
from megapack.pipeline.simulator import simulate_planned
from tests import strategies
from tests.strategies import planned, replanned

pytestmark = pytest.mark.property

Drawn = tuple[list[int], dict[str, Any]]


@st.composite
def wide(draw: st.DrawFn) -> Drawn:
    """Steps whose rows may lie over several ranks."""
    choose = strategies.chooser(draw)
    lengths, arguments = strategies.long_and_short(draw)
    return lengths, {
        **arguments,
        "layout": strategies.layout(choose, dp=range(1, 10), pp=(1, 2, 3)),
        "cost": strategies.cost(choose, cp_overhead=(0.0, 0.05, 1.0)),
        "policy": strategies.policy(
            choose,
            context_parallel=("dynamic",),
            count_rule=("legal", "multiple"),
            oversize=("alone",),
            row_shape=("planned",),
            unreachable=("pad", "pad", "drop", "error"),
            max_live_tokens_per_gpu=(None, *range(200, 2001, 100)),
        ),
    }


@st.composite
def in_pieces(draw: st.DrawFn) -> Drawn:
    """Steps whose samples may be in pieces, and whose backwards may be split."""
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
            count_rule=("legal", "legal", "multiple"),
            row_shape=("planned", "planned", "planned", "uniform"),
            unreachable=("pad", "pad", "drop", "error"),
            max_live_tokens_per_gpu=(None, *range(200, 3001, 100)),
        ),
    }


def check(drawn: Drawn, **without: str) -> None:
    """Hold the invariants, and that the plan without the freedoms is not faster."""
    lengths, arguments = drawn
    policy = arguments["policy"]
    cost = arguments["cost"]
    assert isinstance(policy, Policy)
    assert cost is None or isinstance(cost, CostModel)
    plan = planned(lengths, arguments)
    other = {**arguments, "policy": dataclasses.replace(policy, **without)}  # type: ignore[arg-type]
    plain = planned(lengths, other)
    if plan is None:
        # What is cut or lies over several ranks is nowhere alone over the budget.
        assert plain is None or policy.split_samples == "auto" or "context_parallel" in without
        return
    check_plan(plan, lengths)
    replanned(plan, lengths, arguments)
    for number, step in enumerate(plan.steps):
        simulation = simulate_planned(plan, step, cost)
        cap = policy.max_live_tokens_per_gpu
        assert cap is None or simulation.peak_live_tokens <= cap
        if policy.unreachable != "pad":
            assert all(mb.samples for mb in step.microbatches)
        # The lengths of `row_shapes` follow from other rows.
        if plain is None or _is_over_budget(plain) or plan.row_lengths:
            continue
        fixed = simulate_planned(plain, plain.steps[number], cost)
        assert simulation.makespan <= fixed.makespan * (1 + 1e-9)


def _is_over_budget(plan: Plan) -> bool:
    """Whether a row is over the budget, which both kinds of freedom forbid."""
    rows = (mb for step in plan.steps for mb in step.microbatches)
    return any(mb.padded_tokens > plan.capacity * mb.width for mb in rows)


@given(wide())
@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
def test_wide_rows_keep_the_invariants_and_are_never_slower(drawn: Drawn) -> None:
    check(drawn, context_parallel="fixed")


@given(in_pieces())
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_pieces_and_orders_keep_the_invariants_and_are_never_slower(drawn: Drawn) -> None:
    check(drawn, split_samples="off", backward="joint")


@given(wide())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_sample_that_fits_on_no_group_is_an_error_and_others_are_planned(drawn: Drawn) -> None:
    lengths, arguments = drawn
    layout = arguments["layout"]
    budget = arguments["max_tokens_per_gpu"]
    assert isinstance(layout, Layout)
    assert isinstance(budget, int)
    free = {**arguments, "policy": Policy(context_parallel="dynamic", search=40)}
    capacity = budget * layout.cp // layout.row_alignment * layout.row_alignment
    if capacity == 0:
        return
    free |= {"colocate_ids": None, "num_steps": None}
    fits = all(
        any(
            layout.over(width).aligned_row_tokens(layout.over(width).aligned_sample_tokens(length))
            <= capacity * width
            for width in layout.widths
        )
        for length in lengths
    )
    if fits:
        check_plan(build_dp_schedule(lengths, **free), lengths)
        return
    with pytest.raises(PlanError, match="no aligned block of up to") as caught:
        build_dp_schedule(lengths, **free)
    free["max_tokens_per_gpu"] = int(str(caught.value).split("to ")[-1].split()[0])
    check_plan(build_dp_schedule(lengths, **free), lengths)
