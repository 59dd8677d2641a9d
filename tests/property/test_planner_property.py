"""Random inputs give a plan that keeps its invariants, or a documented error."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megapack import (
    Layout,
    Policy,
    check_plan,
    simulate,
)
from megapack.cost.model import cost_in_tokens
from tests import strategies
from tests.strategies import planned, replanned

pytestmark = pytest.mark.property


@st.composite
def inputs(draw: st.DrawFn) -> tuple[list[int], dict[str, Any]]:
    choose = strategies.chooser(draw)
    longest = draw(st.sampled_from([1, 17, 300, 300, 2**28]))
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=60))
    names = st.sampled_from(["a", "b", "0", 10**20, "\n", "\ud800"])
    rollouts = st.integers(0, max(1, len(lengths) // 2)) | names
    ids = st.lists(rollouts, min_size=len(lengths), max_size=len(lengths))
    budget = draw(st.none() | st.integers(1, 600) | st.sampled_from([2**28, 2**40]))
    rollout_ids = draw(st.none() | ids)
    colocate_ids = draw(st.none() | st.just("pairs") | st.just("torn"))
    if colocate_ids is not None:
        size = draw(st.integers(1, 4))
        sets = [draw(st.integers(0, len(lengths) // size)) for _ in lengths]
        # "pairs" are within one rollout; "torn" sets may be in two, which is refused.
        keep = rollout_ids is not None and colocate_ids == "pairs"
        colocate_ids = (
            [f"{s} {r}" for s, r in zip(sets, rollout_ids, strict=True)] if keep else sets
        )
    adapters = st.lists(st.integers(0, 2) | names, min_size=len(lengths), max_size=len(lengths))
    size = draw(st.integers(1, 5)) if budget is None else None
    steps = draw(st.sampled_from(["one", "size", "count"]))
    return lengths, {
        "layout": strategies.layout(
            choose,
            dp=range(1, 7),
            tp=(1, 2, 8),
            vpp=(1, 2, 3),
            cp=(1, 1, 2, 3, 8),
            fp8=(False, False, True, "mxfp8", "blockwise"),
        ),
        "max_tokens_per_gpu": budget,
        "micro_batch_size": size,
        "rollout_ids": rollout_ids,
        "colocate_ids": colocate_ids,
        "adapter_ids": draw(st.none() | adapters),
        "global_batch_size": draw(st.integers(1, 20)) if steps == "size" else None,
        "num_steps": draw(st.integers(1, 5)) if steps == "count" else None,
        "cost": strategies.cost(
            choose, per_token=(0.0, 1.0, 1e-6, 1e-300, 1e300), backward_ratio=(0.0, 2.0, 2.5)
        ),
        "policy": strategies.policy(choose),
        "forward_only": draw(st.booleans()),
    }


def test_every_field_of_a_policy_is_drawn() -> None:
    assert [*strategies.POLICY] == [field.name for field in dataclasses.fields(Policy)]


def check(lengths: list[int], arguments: dict[str, Any]) -> None:
    """Plan and check everything that is promised, unless the arguments are refused."""
    layout = arguments["layout"]
    policy = arguments["policy"]
    assert isinstance(layout, Layout)
    assert isinstance(policy, Policy)
    plan = planned(lengths, arguments)
    if plan is None:
        return
    check_plan(plan, lengths)
    for step in plan.steps:
        real = [mb for mb in step.microbatches if mb.samples]
        has_padding = any(not mb.samples for mb in step.microbatches)
        sets = (
            [{plan.colocate_ids[i] for i in mb.begun_samples} for mb in real]
            if plan.colocate_ids
            else [set(mb.begun_samples) for mb in real]
        )
        assert len(set().union(*sets)) == sum(map(len, sets))
        if policy.context_parallel == "fixed" and policy.split_samples == "off":
            # Padding is added only if no row can be split, and to no rank alone.
            assert not has_padding or all(len(names) == 1 for names in sets)
            idle = [rank for rank in step.ranks if not any(mb.samples for mb in rank)]
            assert len(real) < layout.dp or not idle
        simulation = simulate(step, layout=layout, forward_only=plan.forward_only)
        cap = policy.max_live_tokens_per_gpu
        assert cap is None or simulation.peak_live_tokens <= cap
    replanned(plan, lengths, arguments)
    if policy.adapters == "one" or plan.adapter_ids is None:
        return
    # Rows hold the same samples without adapters, in another order, or one adapter each if that is
    # as fast.
    other = planned(lengths, {**arguments, "adapter_ids": None})
    assert other is not None
    settings = {"layout": layout, "cost": arguments["cost"] or cost_in_tokens(layout)}
    settings |= {"lockstep": layout.ep_spans_dp, "forward_only": plan.forward_only}
    for step, own in zip(plan.steps, other.steps, strict=True):
        assert len(step.dropped_rollouts) <= len(own.dropped_rollouts)
        adapters = [{plan.adapter_ids[i] for i in mb.samples} for mb in step.microbatches]
        if all(len(names) <= 1 for names in adapters):
            seconds = simulate(own, **settings).makespan
            assert simulate(step, **settings).makespan <= 1.002 * seconds
            continue
        for rows, own_rows in zip(step.ranks, own.ranks, strict=True):
            assert [sorted(mb.samples) for mb in rows] == [sorted(mb.samples) for mb in own_rows]


@given(inputs())
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_random_inputs_keep_the_invariants_or_are_refused(
    drawn: tuple[list[int], dict[str, Any]],
) -> None:
    check(*drawn)


@pytest.mark.slow
@given(inputs())
@settings(
    max_examples=int(os.environ.get("MEGAPACK_EXAMPLES", "10000")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
def test_ten_thousand_random_inputs(drawn: tuple[list[int], dict[str, Any]]) -> None:
    check(*drawn)
