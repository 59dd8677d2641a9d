"""Random steps with rows over several ranks keep the invariants, and are not slower than without.

The policies, layouts and lengths are those of `test_planner_property`, as far as
context_parallel="dynamic" allows them.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megapack import (
    CostModel,
    Layout,
    MegapackError,
    Plan,
    PlanError,
    Policy,
    build_dp_schedule,
    check_plan,
)
from megapack.pipeline.simulator import simulate_planned

pytestmark = pytest.mark.property


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    pp = draw(st.sampled_from([1, 2, 3]))
    vpp = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    dp = draw(st.integers(1, 9))
    cp = draw(st.sampled_from([1, 1, 2]))
    return Layout(
        dp=dp,
        tp=draw(st.sampled_from([1, 2])),
        pp=pp,
        vpp=vpp,
        cp=cp,
        ep=draw(st.sampled_from([1, 1, dp * cp])),
        sequence_parallel=draw(st.booleans()),
        microbatch_group_size=draw(st.none() | st.integers(pp, 2 * pp)) if vpp > 1 else None,
        fp8=draw(st.sampled_from([False, False, True])),
    )


policies = st.builds(
    Policy,
    context_parallel=st.just("dynamic"),
    count_rule=st.sampled_from(["legal", "multiple"]),
    unreachable=st.sampled_from(["pad", "pad", "drop", "error"]),
    balance=st.sampled_from(["time", "time", "tokens"]),
    search=st.sampled_from([0, 1, 40, 300]),
    group_size=st.sampled_from(["fixed", "search"]),
    max_live_tokens_per_gpu=st.none() | st.none() | st.integers(200, 2000),
)

costs = st.none() | st.builds(
    CostModel,
    fixed=st.sampled_from([0.0, 1.0, 100.0]),
    per_token=st.sampled_from([0.0, 1.0]),
    per_token_sq=st.sampled_from([0.0, 1e-2]),
    per_sample=st.sampled_from([0.0, 3.0]),
    p2p=st.sampled_from([0.0, 2.0]),
    cp_overhead=st.sampled_from([0.0, 0.05, 1.0]),
)


@st.composite
def inputs(draw: st.DrawFn) -> tuple[list[int], dict[str, Any]]:
    """Mostly short samples, a few long ones, and sets of neighbours that stay together."""
    lengths = draw(st.lists(st.integers(1, 60), min_size=1, max_size=40))
    lengths += draw(st.lists(st.integers(100, 900), max_size=4))
    size = draw(st.sampled_from([1, 1, 2, 3]))
    return lengths, {
        "layout": draw(layouts()),
        "max_tokens_per_gpu": draw(st.integers(30, 600)),
        "colocate_ids": [i // size for i in range(len(lengths))] if size > 1 else None,
        "cost": draw(costs),
        "policy": draw(policies),
        "forward_only": draw(st.booleans()),
    }


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def planned(lengths: list[int], arguments: dict[str, Any]) -> Plan | None:
    """The plan; None if it is refused in one line."""
    try:
        return build_dp_schedule(lengths, **arguments)
    except MegapackError as error:
        if len(str(error).splitlines()) != 1:
            raise
        return None


@given(inputs())
@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
def test_wide_rows_keep_the_invariants_and_are_never_slower(
    drawn: tuple[list[int], dict[str, Any]],
) -> None:
    lengths, arguments = drawn
    policy = arguments["policy"]
    cost = arguments["cost"]
    assert isinstance(policy, Policy)
    assert cost is None or isinstance(cost, CostModel)
    narrow = planned(
        lengths, {**arguments, "policy": dataclasses.replace(policy, context_parallel="fixed")}
    )
    plan = planned(lengths, arguments)
    if plan is None:
        return
    check_plan(plan, lengths)
    assert Plan.from_json(plan.to_json()) == plan
    again = planned(lengths, arguments)
    assert again is not None
    assert again.digest() == plan.digest()
    for number, step in enumerate(plan.steps):
        simulation = simulate_planned(plan, step, cost)
        cap = policy.max_live_tokens_per_gpu
        assert cap is None or simulation.peak_live_tokens <= cap
        if policy.unreachable != "pad":
            assert all(mb.samples for mb in step.microbatches)
        if narrow is None or _is_over_budget(narrow):
            continue
        fixed = simulate_planned(narrow, narrow.steps[number], cost)
        assert simulation.makespan <= fixed.makespan * (1 + 1e-9)


def _is_over_budget(plan: Plan) -> bool:
    """Whether a row of one rank is over the budget, which context_parallel="dynamic" forbids."""
    rows = (mb for step in plan.steps for mb in step.microbatches)
    return any(mb.padded_tokens > plan.capacity for mb in rows)


@given(inputs())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_sample_that_fits_on_no_group_is_an_error_and_others_are_planned(
    drawn: tuple[list[int], dict[str, Any]],
) -> None:
    lengths, arguments = drawn
    layout = arguments["layout"]
    budget = arguments["max_tokens_per_gpu"]
    assert isinstance(layout, Layout)
    assert isinstance(budget, int)
    free = {**arguments, "policy": Policy(context_parallel="dynamic", search=40)}
    capacity = budget * layout.cp // layout.row_alignment * layout.row_alignment
    if capacity == 0:
        return
    free["colocate_ids"] = None
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
