"""Orders of a step's own where the speed of attention's kernels is only assumed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megapack import Layout, Plan, Policy, build_dp_schedule, check_plan, simulate
from megapack.cost.model import CostModel, cost_in_tokens

pytestmark = pytest.mark.unit

LAYOUT = Layout(dp=2, pp=4)
COST = cost_in_tokens(LAYOUT)
LENGTHS = np.random.default_rng(3).integers(100, 16000, 40)
OWN = Policy(split_samples="auto", backward="split", search=256)


def planned(cost: CostModel | None = None, policy: Policy = OWN, budget: int = 16384) -> Plan:
    plan = build_dp_schedule(
        LENGTHS, layout=LAYOUT, max_tokens_per_gpu=budget, cost=cost, policy=policy
    )
    check_plan(plan, LENGTHS)
    return plan


def seconds(plan: Plan, cost: CostModel) -> float:
    return simulate(plan.steps[0], layout=LAYOUT, cost=cost).makespan


def test_an_order_of_its_own_is_faster_at_every_speed() -> None:
    simple, own = planned(policy=Policy(search=256)), planned()
    assert own.steps[0].orders, "nothing is tested"
    assert len(COST.every_speed()) == 3
    for cost in COST.every_speed():
        assert seconds(own, cost) < seconds(simple, cost)


def test_an_order_that_one_speed_makes_slower_is_not_planned() -> None:
    """Squares that may be free, or as dear as a hundred times: what is even by one of them is not
    by the others."""
    layout = Layout(dp=2, pp=4, vpp=2)
    cost = replace(cost_in_tokens(layout), square_range=(1.0, 0.01, 100.0))
    lengths = np.random.default_rng(11).integers(100, 16000, 24)

    def times(policy: Policy, cost: CostModel) -> list[float]:
        plan = build_dp_schedule(
            lengths, layout=layout, max_tokens_per_gpu=16384, cost=cost, policy=policy
        )
        return [
            simulate(plan.steps[0], layout=layout, cost=own).makespan
            for own in replace(cost, square_range=(1.0, 0.01, 100.0)).every_speed()
        ]

    simple = times(Policy(search=256), cost)
    certain = times(OWN, replace(cost, square_range=(1.0,)))
    assert certain[0] < simple[0]
    assert certain[2] > simple[2], "nothing is tested"
    assert all(own <= one for own, one in zip(times(OWN, cost), simple, strict=True))


def test_samples_that_must_be_cut_are_at_every_speed() -> None:
    plan = planned(budget=4096)
    assert plan.counts.num_pieces > 10
    # Compared by one cost model: a search that took each speed's seconds at its word would take
    # the plan of the fastest attention.
    certain = planned(replace(COST, square_range=(1.0,)), budget=4096)
    assert seconds(plan, COST) < 1.1 * seconds(certain, COST)


def test_the_default_cost_is_the_commands() -> None:
    assert planned() == planned(COST)
    assert COST.per_token_sq == 1 / 49152
    assert COST.fixed * LAYOUT.num_chunks == 256


def test_explained_gains_have_a_range() -> None:
    gains = {gain.setting: gain for gain in planned().explain().gains}
    least, most = gains["backward"].gain_range or (0.0, 0.0)
    assert least <= (gains["backward"].gain or 0.0) <= most
    assert f"{least:.1%} to {most:.1%} by the speed of attention" in str(planned().explain())
    certain = planned(replace(COST, square_range=(1.0,)))
    assert all(gain.gain_range is None for gain in certain.explain().gains)
