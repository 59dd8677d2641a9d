"""Ranks with long samples get less work, where that makes the step faster."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megapack import CostModel, Layout, Policy, build_dp_schedule, check_plan, simulate
from megapack.planner.items import Items
from megapack.planner.scored import Way
from megapack.planner.step import Step
from megapack.planner.targets import equal_target, uneven_target

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("layout", [Layout(dp=4, pp=4), Layout(dp=4, pp=4, vpp=2)], ids=str)
def test_heavy_and_light_ranks_end_together(layout: Layout) -> None:
    # One sample has over a third of a rank's work, and no other one has more than a mean row.
    lengths = np.array([15000, *[300] * 400])
    step = Step(
        number=0,
        lengths=lengths,
        layout=layout,
        policy=Policy(),
        cost=CostModel(fixed=1.0, per_token=1.0),
        budget=32768,
    )
    samples = np.arange(lengths.size)
    way = Way(Items.whole(step, samples, samples))
    equal = equal_target(way, 20, rounds=2)
    uneven = uneven_target(way, equal, rounds=2)
    assert uneven is not None
    assert uneven.num_heavy == 1
    assert uneven.shares[0] + 3 * uneven.shares[1] == pytest.approx(4)
    assert uneven.shares[0] < 0.95 * uneven.shares[1]
    assert uneven.seconds < equal.seconds
    rows = uneven.rows(way)
    assert rows.shape == (4, 20)
    assert rows.sum() == pytest.approx(4 * way.rank_work, rel=0.05)
    alike = replace(step, lengths=np.full(401, 300))
    same = Way(Items.whole(alike, samples, samples))
    assert uneven_target(same, equal_target(same, 20, rounds=1), rounds=1) is None


def test_a_long_sample_leaves_its_rank_less_work() -> None:
    """With about equal work of all ranks, this step took 1.37 times equal work."""
    layout = Layout(dp=4, pp=4)
    rng = np.random.default_rng(0)
    lengths = np.concatenate([[20000], rng.integers(300, 900, 1200)])
    cost = CostModel(fixed=256e-6 / 4, per_token=1e-6, per_token_sq=1e-6 / 12288)
    plan = build_dp_schedule(lengths, layout=layout, max_tokens_per_gpu=36864, cost=cost)
    check_plan(plan, lengths)
    step = plan.steps[0]
    simulation = simulate(step, layout=layout, cost=cost)
    work = np.array(simulation.rank_work)
    own = next(r for r, rank in enumerate(step.ranks) for mb in rank if 0 in mb.samples)
    assert work[own] < 0.7 * np.delete(work, own).min()
    equal = 3e-6 * float((lengths + lengths**2 / 12288).sum()) / 16
    assert simulation.makespan < 1.3 * equal
