"""The lower bound for every freedom: no plan beats it, and small steps have it by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megapack import CostModel, Layout, Policy, build_dp_schedule, simulate
from tools.benching.lower_bound import sample_seconds
from tools.benching.ramp_bound import ramp_bound

pytestmark = pytest.mark.unit

COST = CostModel(fixed=1.0, per_token=1.0)
EVERYTHING = Policy(context_parallel="dynamic", split_samples="auto", backward="split")


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        # One row: 3 s per second of it.
        (Layout(), 3 * (8 + 1)),
        # The second stage begins after the first row, r, and runs 3 s for each of 8 + 2. The second
        # row arrives after 10 s: r + 30 = 10 + 3 (10 - r), so r = 2.5. One row takes 9 + 27 s, and
        # three at least 1 + 33.
        (Layout(pp=2), 2.5 + 30),
        # Two ranks have half of the work each: r + 18 = 6 + 3 (6 - r).
        (Layout(dp=2, pp=2), 1.5 + 18),
    ],
    ids=str,
)
def test_a_small_step_by_hand(layout: Layout, expected: float) -> None:
    bound = ramp_bound(np.array([6.0, 2.0]), layout, COST, 1)
    assert bound == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "layout", [Layout(dp=4, pp=4), Layout(dp=2, pp=4, vpp=2), Layout(dp=8, pp=2)], ids=str
)
def test_no_plan_with_every_freedom_beats_it(layout: Layout) -> None:
    rng = np.random.default_rng(3)
    gaps = []
    for sigma in (0.2, 0.8, 1.4):
        lengths = np.clip(rng.lognormal(6, sigma, 96), 16, 8192).astype(np.int64)
        cost = CostModel(fixed=64 / layout.vpp, per_token=1.0, per_token_sq=1e-4, cp_overhead=0.05)
        budget = 4096
        plan = build_dp_schedule(
            lengths, layout=layout, max_tokens_per_gpu=budget, cost=cost, policy=EVERYTHING
        )
        found = simulate(plan.steps[0], layout=layout, cost=cost).makespan
        least = math.ceil(lengths.sum() / (budget * layout.dp))
        bound = ramp_bound(sample_seconds(lengths, layout, cost), layout, cost, least)
        gaps.append(found / bound)
    assert min(gaps) >= 1
    assert min(gaps) < 1.15
