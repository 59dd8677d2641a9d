"""The lower bound of the planner's tables: no plan of small steps beats it, and some reach it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from megapack import CostModel, Layout, build_dp_schedule, simulate
from megapack.pipeline.kernels import rank_seconds
from megapack.pipeline.simulator import Runner
from tools.benching.lower_bound import LowerBounds, sample_seconds

pytestmark = pytest.mark.unit


def best_of_all_plans(seconds: np.ndarray, layout: Layout, cost: CostModel, most: int) -> float:
    """The fewest seconds of all assignments to ranks and places, for all legal M up to `most`."""
    best = np.inf
    runner = Runner(layout, cost)
    subsets = range(1 << seconds.size)
    for count in range(1, most + 1):
        if not layout.is_legal_count(count):
            continue
        ops = runner.ops(count, layout.group_size)
        end = np.empty(ops.stage.size)
        # Of one rank with each subset of the samples.
        of_rank = []
        for subset in subsets:
            own = [k for k in range(seconds.size) if subset >> k & 1]
            fewest = np.inf
            for row_of in itertools.product(range(count), repeat=len(own)):
                rows = np.array(row_of, dtype=np.int64)
                work = np.bincount(rows, weights=seconds[own], minlength=count)
                fewest = min(fewest, rank_seconds(ops, cost.fixed + work, end))
            of_rank.append(fewest)
        everything = subsets[-1]
        if layout.dp == 1:
            best = min(best, of_rank[everything])
        else:
            best = min(best, *(max(of_rank[s], of_rank[everything - s]) for s in subsets))
    return float(best)


LAYOUTS = [Layout(dp=2, pp=2), Layout(dp=1, pp=2, vpp=2), Layout(dp=2)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_no_plan_of_a_small_step_beats_the_bound(layout: Layout) -> None:
    cost = CostModel(fixed=1.0, per_token=1.0)
    bounds = LowerBounds(layout, cost)
    rng = np.random.default_rng(0)
    gaps = []
    for spread in (1.0, 30.0):
        seconds = 1 + spread * rng.random(5)
        best = best_of_all_plans(seconds, layout, cost, 3)
        bound = bounds.of(seconds, 1).seconds
        assert bound <= best
        gaps.append(best / bound)
    assert min(gaps) < 1.25


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(dp=4, pp=2)], ids=str)
def test_equal_samples_that_divide_evenly_reach_the_bound(layout: Layout) -> None:
    """Without a pipeline any plan; with one, a rank whose samples are all in the only row."""
    cost = CostModel(fixed=1000.0, per_token=1.0)
    lengths = np.full(8, 100)
    plan = build_dp_schedule(lengths, layout=layout, max_tokens_per_gpu=400, cost=cost)
    best = simulate(plan.steps[0], layout=layout, cost=cost).makespan
    bound = LowerBounds(layout, cost).of(sample_seconds(lengths, layout, cost), 1)
    assert bound.num_microbatches == 1
    assert bound.seconds == pytest.approx(best, rel=1e-5)
