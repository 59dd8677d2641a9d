"""Rows over several DP ranks: what the search gains, and what it must not do."""

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
    SharedPrefixes,
    build_dp_schedule,
    check_plan,
    simulate,
)
from megapack.pipeline.simulator import simulate_planned

pytestmark = pytest.mark.unit

COST = CostModel(fixed=100.0, per_token=1.0, per_token_sq=1 / 12288)
DYNAMIC = Policy(context_parallel="dynamic")
RNG = np.random.default_rng(7)
SHORT = np.clip(RNG.lognormal(6, 0.8, 120), 1, 4000).astype(int).tolist()
# One sample has a quarter of all work.
ONE_LONG = [*SHORT, 12000]
LAYOUTS = [
    Layout(dp=8),
    Layout(dp=4, pp=4),
    Layout(dp=4, pp=4, vpp=2),
    Layout(dp=2, pp=4, vpp=2, microbatch_group_size=6),
    Layout(dp=4, pp=2, ep=4),
    Layout(dp=6, pp=2, cp=2),
]


def planned(lengths: list[int], layout: Layout, policy: Policy, **arguments: Any) -> Plan:
    arguments = {"max_tokens_per_gpu": 32768, "cost": COST, **arguments}
    plan = build_dp_schedule(lengths, layout=layout, policy=policy, **arguments)
    check_plan(plan, lengths)
    return plan


def seconds(plan: Plan, cost: CostModel | None = COST) -> float:
    return sum(simulate_planned(plan, step, cost).makespan for step in plan.steps)


def widths(plan: Plan) -> list[int]:
    return sorted(mb.width for step in plan.steps for mb in step.microbatches)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_long_sample_no_longer_decides_the_step(layout: Layout) -> None:
    fixed = seconds(planned(ONE_LONG, layout, Policy()))
    plan = planned(ONE_LONG, layout, DYNAMIC)
    even = sum(n + n * n / 12288 for n in ONE_LONG) * 3 / (layout.dp * layout.pp * layout.cp)
    assert seconds(plan) < 1.8 * even < fixed
    assert widths(plan)[-1] > 1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("search", [0, 256])
def test_samples_over_the_budget_go_over_as_many_ranks_as_hold_them(
    layout: Layout, search: int
) -> None:
    lengths = [*SHORT, 4000 * layout.widths[-1] * layout.cp, 5000 * layout.cp]
    policy = dataclasses.replace(DYNAMIC, search=search, oversize="error")
    plan = planned(lengths, layout, policy, max_tokens_per_gpu=4096)
    width = {i: mb.width for mb in plan.steps[0].microbatches for i in mb.samples}
    assert width[len(SHORT)] == layout.widths[-1]
    assert width[len(SHORT) + 1] >= 2


def test_a_sample_that_fits_on_no_group_is_named_with_what_to_set() -> None:
    layout = Layout(dp=6, pp=2)
    with pytest.raises(PlanError, match=r"sample 2: 4001 tokens.* 4 of dp=6 ranks.* to 1002 or"):
        planned([9, 9, 4001], layout, DYNAMIC, max_tokens_per_gpu=1000)
    planned([9, 9, 4001], layout, DYNAMIC, max_tokens_per_gpu=1002)


def test_colocated_samples_over_the_budget_go_over_ranks_together() -> None:
    lengths = [700, 700, 50, 60, 70, 80]
    plan = planned(
        lengths,
        Layout(dp=2),
        DYNAMIC,
        max_tokens_per_gpu=750,
        colocate_ids=["a", "a", "b", "b", "c", "c"],
    )
    pair = next(mb for mb in plan.steps[0].microbatches if 0 in mb.samples)
    assert 1 in pair.samples
    assert pair.width == 2
    with pytest.raises(PlanError, match=r"samples \[0, 1\] of colocate id 'a': 1400 tokens"):
        planned(
            lengths,
            Layout(dp=2),
            DYNAMIC,
            max_tokens_per_gpu=650,
            colocate_ids=["a", "a", "b", "b", "c", "c"],
        )


def test_long_samples_share_a_wide_row() -> None:
    """Two samples over the budget of two ranks, and a budget with room for both of them there."""
    plan = planned([600, 390], Layout(dp=2), DYNAMIC, max_tokens_per_gpu=500)
    (row,) = plan.steps[0].microbatches
    assert row.samples == (0, 1)
    assert row.width == 2


@pytest.mark.parametrize("layout", LAYOUTS[1:4])
def test_live_tokens_stay_below_the_cap(layout: Layout) -> None:
    free = simulate(planned(ONE_LONG, layout, DYNAMIC).steps[0], layout=layout).peak_live_tokens
    cap = int(free * 0.7)
    policy = dataclasses.replace(DYNAMIC, max_live_tokens_per_gpu=cap)
    plan = planned(ONE_LONG, layout, policy)
    assert simulate(plan.steps[0], layout=layout).peak_live_tokens <= cap


def test_shared_prefixes_and_wide_rows_together() -> None:
    lengths = [*[900] * 16, *SHORT[:40], 12000]
    groups = [*[0] * 16, *range(1, 42)]
    prefixes = SharedPrefixes.from_groups(groups, [800] * 16 + [1] * 41)
    layout = Layout(dp=4, pp=2)
    plan = planned(lengths, layout, DYNAMIC, prefixes=prefixes)
    fixed = planned(lengths, layout, Policy(), prefixes=prefixes)
    assert seconds(plan) < 0.7 * seconds(fixed)
    assert sum(mb.shared_tokens for mb in plan.steps[0].microbatches) > 0
    assert widths(plan)[-1] == 4


def test_one_row_per_sample_is_found_among_more_than_a_hundred() -> None:
    # Fewer of them hold all tokens, but no two samples fit into a row.
    lengths = [7864] * 105
    plan = planned(lengths, Layout(dp=8), DYNAMIC, max_tokens_per_gpu=1024)
    assert plan.steps[0].num_microbatches == 105
    assert widths(plan) == [8] * 105
