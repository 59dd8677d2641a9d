from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from megapack import (
    CostModel,
    Layout,
    Plan,
    PlanError,
    Policy,
    build_dp_schedule,
    check_plan,
    simulate,
)
from megapack.pipeline.kernels import rank_seconds
from megapack.pipeline.simulator import Runner
from megapack.planner.targets import find_profile

pytestmark = pytest.mark.unit

COST = CostModel(fixed=100.0, per_token=1.0, per_token_sq=1 / 12288)
RNG = np.random.default_rng(7)
LONG_TAILED = np.clip(RNG.lognormal(6, 1.1, 400), 1, 16000).astype(int).tolist()
LAYOUTS = [
    Layout(dp=8),
    Layout(dp=4, pp=4),
    Layout(dp=4, pp=4, vpp=2),
    Layout(dp=2, pp=4, vpp=2, microbatch_group_size=6),
    Layout(dp=4, pp=2, ep=4),
]


def seconds(plan: Plan, cost: CostModel = COST) -> float:
    layout = plan.layout
    return sum(
        simulate(
            step,
            layout=layout,
            cost=cost,
            lockstep=layout.ep_spans_dp,
            forward_only=plan.forward_only,
        ).makespan
        for step in plan.steps
    )


def planned(layout: Layout, policy: Policy, **arguments: Any) -> Plan:
    plan = build_dp_schedule(
        LONG_TAILED,
        layout=layout,
        max_tokens_per_gpu=16384,
        cost=COST,
        policy=policy,
        **arguments,
    )
    check_plan(plan, LONG_TAILED)
    return plan


@pytest.mark.parametrize("layout", LAYOUTS)
def test_more_search_is_faster_and_none_is_acceptable(layout: Layout) -> None:
    """Without search a step takes less than 1.6 times equal work, and less with search."""
    built, default, long = (
        seconds(planned(layout, Policy(search=n))) for n in (0, Policy.search, 8192)
    )
    even = sum(n + n * n / 12288 for n in LONG_TAILED) * 3 / (layout.dp * layout.pp)
    assert even < long <= default * 1.001
    assert default < built * 1.001
    assert built < even * 1.6


def test_ranks_in_lockstep_get_similar_rows() -> None:
    layout = Layout(dp=4, pp=2, ep=4)
    step = planned(layout, Policy()).steps[0]
    lockstep = simulate(step, layout=layout, cost=COST, lockstep=True).makespan
    free = simulate(step, layout=layout, cost=COST).makespan
    dense = planned(dataclasses.replace(layout, ep=1), Policy()).steps[0]
    assert free <= lockstep < 1.25 * free
    assert lockstep <= simulate(dense, layout=layout, cost=COST, lockstep=True).makespan


@pytest.mark.parametrize("layout", [Layout(dp=2, pp=4), Layout(dp=2, pp=4, vpp=2), Layout(cp=2)])
def test_live_tokens_stay_below_the_cap(layout: Layout) -> None:
    free = simulate(planned(layout, Policy()).steps[0], layout=layout).peak_live_tokens
    cap = max(int(free * 0.75), 12_000)
    plan = planned(layout, Policy(max_live_tokens_per_gpu=cap))
    assert simulate(plan.steps[0], layout=layout).peak_live_tokens <= cap
    with pytest.raises(PlanError, match="max_live_tokens_per_gpu=500"):
        planned(layout, Policy(max_live_tokens_per_gpu=500))


@pytest.mark.parametrize(("pp", "vpp", "count"), [(4, 1, 24), (4, 2, 24), (8, 4, 32)])
def test_a_profile_beats_equal_micro_batches(pp: int, vpp: int, count: int) -> None:
    layout = Layout(pp=pp, vpp=vpp)
    runner = Runner(layout, CostModel(per_token=1.0))
    equal = 3 * (1 + (pp - 1) / (vpp * count)) * vpp
    profile = find_profile(
        runner, count, work=1.0, fixed=0.0, cap=2.0 / count, huge=np.zeros(0), rounds=8
    )
    assert profile.seconds < equal * 0.985
    targets = profile.sizes(1.0, np.zeros(0), 2.0 / count)
    assert targets.sum() == pytest.approx(1)
    assert targets.max() <= 2.0 / count * (1 + 1e-9)
    ops = runner.ops(count)
    seconds = rank_seconds(ops, targets, np.empty(ops.stage.size))
    assert seconds == pytest.approx(profile.seconds)


@pytest.mark.parametrize("dp", [2, 3, 8])
def test_ranks_without_a_pipeline_end_together(dp: int) -> None:
    """With 400 samples exchanges bring every rank within a token or two of the mean."""
    plan = build_dp_schedule(LONG_TAILED, layout=Layout(dp=dp), max_tokens_per_gpu=16384, cost=COST)
    check_plan(plan, LONG_TAILED)
    ranks = simulate(plan.steps[0], layout=Layout(dp=dp), cost=COST).rank_makespans
    assert max(ranks) / (sum(ranks) / dp) < 1 + 1e-4
