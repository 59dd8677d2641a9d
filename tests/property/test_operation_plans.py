"""Random steps with pieces of samples and split backwards keep the invariants, and are not slower.

The policies, layouts and lengths are those of `test_planner_property`, as far as split samples and
split backwards allow them.
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
    Policy,
    build_dp_schedule,
    check_plan,
)
from megapack.pipeline.simulator import simulate_planned

pytestmark = pytest.mark.property


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    pp = draw(st.sampled_from([1, 2, 2, 3]))
    vpp = draw(st.sampled_from([1, 1, 2])) if pp > 1 else 1
    dp = draw(st.integers(1, 4))
    cp = draw(st.sampled_from([1, 1, 2]))
    return Layout(
        dp=dp,
        tp=draw(st.sampled_from([1, 2])),
        pp=pp,
        vpp=vpp,
        cp=cp,
        ep=draw(st.sampled_from([1, 1, 1, dp * cp])),
        sequence_parallel=draw(st.booleans()),
        microbatch_group_size=draw(st.none() | st.integers(pp, 2 * pp)) if vpp > 1 else None,
        fp8=draw(st.sampled_from([False, False, True])),
    )


policies = st.builds(
    Policy,
    split_samples=st.sampled_from(["auto", "auto", "off"]),
    backward=st.sampled_from(["split", "split", "joint"]),
    context_parallel=st.sampled_from(["fixed", "fixed", "fixed", "dynamic"]),
    count_rule=st.sampled_from(["legal", "legal", "multiple", "per_rank"]),
    row_shape=st.sampled_from(["planned", "planned", "planned", "uniform"]),
    unreachable=st.sampled_from(["pad", "pad", "drop", "error"]),
    oversize=st.sampled_from(["alone", "error"]),
    balance=st.sampled_from(["time", "time", "tokens"]),
    search=st.sampled_from([0, 1, 40, 300]),
    group_size=st.sampled_from(["fixed", "search"]),
    max_live_tokens_per_gpu=st.none() | st.none() | st.integers(200, 3000),
)

costs = st.none() | st.builds(
    CostModel,
    fixed=st.sampled_from([0.0, 1.0, 100.0]),
    per_token=st.sampled_from([0.0, 1.0]),
    per_token_sq=st.sampled_from([0.0, 1e-2]),
    per_sample=st.sampled_from([0.0, 3.0]),
    p2p=st.sampled_from([0.0, 2.0]),
    backward_ratio=st.sampled_from([0.5, 2.0]),
    weight_ratio=st.sampled_from([0.0, 1.0, 1.3]),
)


@st.composite
def inputs(draw: st.DrawFn) -> tuple[list[int], dict[str, Any]]:
    """Mostly short samples, a few long ones, and sets of neighbours that stay together."""
    lengths = draw(st.lists(st.integers(1, 60), min_size=1, max_size=40))
    lengths += draw(st.lists(st.integers(100, 900), max_size=4))
    size = draw(st.sampled_from([1, 1, 1, 3]))
    return lengths, {
        "layout": draw(layouts()),
        "max_tokens_per_gpu": draw(st.integers(30, 600)),
        "colocate_ids": [i // size for i in range(len(lengths))] if size > 1 else None,
        "cost": draw(costs),
        "policy": draw(policies),
        "num_steps": draw(st.sampled_from([None, None, 2])),
        "forward_only": draw(st.sampled_from([False, False, False, True])),
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
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
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
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_text(str(plan)) == plan
    again = planned(lengths, arguments)
    assert again is not None
    assert again.digest() == plan.digest()
    for number, step in enumerate(plan.steps):
        simulation = simulate_planned(plan, step, cost)
        cap = policy.max_live_tokens_per_gpu
        assert cap is None or simulation.peak_live_tokens <= cap
        if policy.unreachable != "pad":
            assert all(mb.samples for mb in step.microbatches)
        if without is None or _is_over_budget(without):
            continue
        fixed = simulate_planned(without, without.steps[number], cost)
        assert simulation.makespan <= fixed.makespan * (1 + 1e-9)


def _is_over_budget(plan: Plan) -> bool:
    """Whether a row is over the budget, which split_samples="auto" cuts."""
    rows = (mb for step in plan.steps for mb in step.microbatches)
    return any(mb.padded_tokens > plan.capacity * mb.width for mb in rows)
