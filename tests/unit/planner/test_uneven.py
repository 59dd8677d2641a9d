"""Ranks with long samples get less work, where that makes the step faster."""

from __future__ import annotations

import numpy as np
import pytest

from megapack import CostModel, Layout, build_dp_schedule, check_plan, simulate
from megapack.pipeline.simulator import Runner
from megapack.planner.profile import Profile, find_profile
from megapack.planner.uneven import concentrated, find_uneven

pytestmark = pytest.mark.unit


def test_concentrated_samples_have_about_equal_sums_in_descending_order() -> None:
    heavy = np.array([9.0, 6.0, 5.0, 4.0, 4.0, 2.0])
    parts = concentrated(heavy, 3, 9)
    assert [part.tolist() for part in parts] == [[9.0], [6.0, 5.0], [4.0, 4.0, 2.0]]
    assert [part.size for part in concentrated(heavy, 3, 2)] == [1, 2, 2]
    assert [part.size for part in concentrated(heavy, 8, 9)] == [1, 0, 1, 1, 1, 1, 1, 0]
    assert [part.size for part in concentrated(np.zeros(0), 2, 9)] == [0, 0]


@pytest.mark.parametrize("layout", [Layout(dp=4, pp=4), Layout(dp=4, pp=4, vpp=2)], ids=str)
def test_heavy_and_light_ranks_end_together(layout: Layout) -> None:
    runner = Runner(layout, CostModel(fixed=0.05, per_token=1.0))
    count = 20

    def find(work: float, huge: np.ndarray) -> Profile:
        return find_profile(
            runner,
            count,
            work=work,
            fixed=0.05,
            cap=30.0,
            huge=huge,
            rounds=2,
        )

    huge = [np.array([30.0]), np.array([6.0]), np.array([6.0]), np.zeros(0)]
    ops = runner.ops(count)
    uneven = find_uneven(find, ops, huge, work=100.0, fixed=0.05, cap=30.0)
    assert uneven is not None
    assert uneven.num_heavy == 1
    assert uneven.shares.mean() == pytest.approx(1)
    assert uneven.shares[0] < 0.95 * uneven.shares[1]
    assert uneven.seconds < 0.95 * find(100.0, huge[0]).seconds
    equal = [np.array([6.0])] * 4
    assert find_uneven(find, ops, equal, work=100.0, fixed=0.05, cap=30.0) is None


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
