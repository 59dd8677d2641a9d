"""Numbers of plans whose rows share prefixes: counts, equal work and efficiencies."""

from __future__ import annotations

import numpy as np
import pytest

from megapack import CostModel, Layout, Policy, SharedPrefixes, build_dp_schedule, plan_report

pytestmark = pytest.mark.unit

COST = CostModel(fixed=2.0, per_token=1.0, per_token_sq=1e-3, p2p=0.5)
RNG = np.random.default_rng(5)
PROMPTS = np.repeat(RNG.integers(50, 400, 24), 8)
LENGTHS = PROMPTS + RNG.integers(20, 200, PROMPTS.size)
PREFIXES = SharedPrefixes.from_groups(np.repeat(np.arange(24), 8).tolist(), PROMPTS.tolist())


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(dp=2, pp=4), Layout(dp=2, pp=2, cp=2)])
@pytest.mark.parametrize("forward_only", [False, True])
def test_no_plan_that_shares_is_faster_than_equal_work(layout: Layout, forward_only: bool) -> None:
    plan = build_dp_schedule(
        LENGTHS,
        layout=layout,
        max_tokens_per_gpu=1600,
        cost=COST,
        prefixes=PREFIXES,
        forward_only=forward_only,
    )
    report = plan_report(plan, LENGTHS, COST)
    assert report.shared_tokens > 0
    assert report.time_over_equal_work is not None
    assert report.time_over_equal_work >= 1


def test_work_that_is_shared_is_counted_once() -> None:
    whole = {"layout": Layout(), "max_tokens_per_gpu": 2**20, "cost": COST}
    shared = build_dp_schedule(LENGTHS, prefixes=PREFIXES, **whole)
    alone = build_dp_schedule(LENGTHS, **whole)
    reports = [plan_report(plan, LENGTHS, COST) for plan in (shared, alone)]
    saved = int((PROMPTS - 1).sum()) // 8 * 7
    assert reports[0].shared_tokens == saved
    assert reports[0].row_tokens == reports[1].row_tokens - saved
    assert reports[0].tokens == reports[1].tokens
    squares = int(((PROMPTS - 1) ** 2).sum()) // 8 * 7
    less = 3 * (saved * COST.per_token + squares * COST.per_token_sq)
    work = [report.equal_work_seconds for report in reports]
    assert work[0] is not None
    assert work[1] is not None
    assert work[1] - work[0] == pytest.approx(less)


def test_efficiency_and_fill_count_what_rows_hold() -> None:
    plan = build_dp_schedule(
        LENGTHS, layout=Layout(dp=2), max_tokens_per_gpu=4000, prefixes=PREFIXES
    )
    report = plan_report(plan, LENGTHS)
    assert report.packing_efficiency == 1.0
    assert report.fill is not None
    assert report.fill <= 1.0
    assert report.lines()[0].startswith("shared prefixes: ")
    off = build_dp_schedule(
        LENGTHS,
        layout=Layout(dp=2),
        max_tokens_per_gpu=4000,
        prefixes=PREFIXES,
        policy=Policy(share_prefixes="off"),
    )
    assert plan_report(off, LENGTHS).lines() == []
    assert off.prefixes is None
