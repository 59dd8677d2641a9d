"""Numbers of steps and plans: counts, simulated seconds, and equal work."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megapack import CostModel, Layout, PlanError, build_dp_schedule, plan_report, simulate
from megapack.outlook.baselines import naive_plans
from megapack.outlook.stats import step_report
from megapack.plan import MicroBatch, Plan, StepPlan

pytestmark = pytest.mark.unit

TOKENS = CostModel(per_token=1.0)
COST = CostModel(fixed=2.0, per_token=1.0, per_token_sq=1e-3, p2p=0.5)
LENGTHS = np.random.default_rng(3).integers(1, 400, 90)


@pytest.mark.parametrize(
    "layout",
    [Layout(dp=2), Layout(dp=2, pp=4), Layout(dp=2, pp=2, vpp=3, cp=2), Layout(dp=4, pp=2, ep=4)],
)
@pytest.mark.parametrize("forward_only", [False, True])
def test_no_plan_is_faster_than_equal_work(layout: Layout, forward_only: bool) -> None:
    rng = np.random.default_rng(0)
    lengths = np.concatenate([rng.integers(1, 400, 150), [900]])
    plan = build_dp_schedule(
        lengths,
        layout=layout,
        max_tokens_per_gpu=1000,
        cost=COST,
        num_steps=2,
        forward_only=forward_only,
    )
    for packed in (plan, *naive_plans(plan, lengths).values()):
        report = plan_report(packed, lengths, COST)
        assert len(report.steps) == 2
        for step in (report, *report.steps):
            assert step.num_rows >= 1
            assert step.imbalance >= 1 - 1e-12
            assert step.seconds >= step.equal_work_seconds * (1 - 1e-12)
            assert step.row_tokens >= step.tokens


def test_a_perfect_plan_takes_equal_work() -> None:
    lengths = [100] * 32
    plan = build_dp_schedule(lengths, layout=Layout(dp=4), max_tokens_per_gpu=400)
    (step,) = plan_report(plan, lengths, TOKENS).steps
    assert (step.num_rows, step.num_padding_rows) == (8, 0)
    assert step.imbalance == 1
    assert (step.bubble_fraction, step.padding_fraction, step.fill) == (0, 0, 1)
    assert step.time_over_equal_work == pytest.approx(1)
    with pytest.raises(PlanError, match="31 lengths"):
        plan_report(plan, lengths[1:])


def test_a_report_sums_its_steps() -> None:
    layout = Layout(dp=2, pp=2, vpp=2, cp=2)
    plan = build_dp_schedule(LENGTHS, layout=layout, num_steps=2, cost=COST, max_tokens_per_gpu=512)
    found = plan_report(plan, LENGTHS, COST)
    runs = [simulate(step, layout=layout, cost=COST) for step in plan.steps]
    assert [step.seconds for step in found.steps] == [run.makespan for run in runs]
    assert found.seconds == pytest.approx(sum(run.makespan for run in runs))
    assert (found.num_steps, found.num_samples) == (2, len(LENGTHS))
    assert found.tokens == LENGTHS.sum()
    assert found.num_rows + found.num_padding_rows == sum(
        2 * (step.num_microbatches or 0) for step in plan.steps
    )
    # Forward, and a backward of twice that: 1 per token, 1/1000 per squared token, over 8 GPUs.
    work = 3 * (LENGTHS.sum() + 1e-3 * (LENGTHS**2).sum()) / 8
    assert found.equal_work_seconds == pytest.approx(work)
    assert found.time_over_equal_work == pytest.approx(found.seconds / work)
    assert found.tokens_per_gpu_second == pytest.approx(LENGTHS.sum() / found.seconds / 8)
    assert 0 < (found.fill or 0) <= 1
    # The largest of any step, not the sum.
    assert found.peak_live_tokens == max(run.peak_live_tokens for run in runs)
    assert min(step.imbalance for step in found.steps) <= found.imbalance
    assert max(step.bubble_fraction for step in found.steps) >= found.bubble_fraction


def step_of(*ranks: list[int]) -> StepPlan:
    """Rows of one sample with so many tokens each; -1 makes a padding micro-batch."""
    rows = tuple(
        tuple(
            MicroBatch((), 1, 0, 0, 0) if n < 0 else MicroBatch((0,), n, n, n * n, n) for n in row
        )
        for row in ranks
    )
    return StepPlan(rows, None, None, (), ("a", "b"))


def test_imbalance_measures_work_not_waiting() -> None:
    """Rank 0 has 3 of 4 tokens, but its bubble is smaller: its time is less than 1.5 times the
    mean."""
    plan = build_dp_schedule([1], layout=Layout(dp=2, pp=2), micro_batch_size=1)
    step = step_of([100, 100, 100], [100])
    found = step_report(plan, step, TOKENS)
    assert found.imbalance == 1.5
    assert found.slowest_rank == 0
    assert found.rank_seconds[0] / np.mean(found.rank_seconds) < 1.4
    # With experts, ranks wait for each other; their work stays the same.
    experts = replace(plan, layout=Layout(dp=2, pp=2, ep=2))
    found = step_report(experts, step_of([300, 100], [100, 100]), TOKENS)
    assert found.imbalance == pytest.approx(4 / 3)
    assert found.rank_seconds[0] == found.rank_seconds[1]


def test_counts_of_a_step_by_hand() -> None:
    counts = step_of([7, 5, -1], [4]).counts
    assert (counts.num_rows, counts.num_padding_rows, counts.num_samples) == (3, 1, 3)
    assert (counts.tokens, counts.row_tokens) == (16, 17)
    assert (counts.num_microbatches, counts.microbatch_span) == ((1, 3), "1-3")
    assert counts.num_dropped_rollouts == 2
    assert counts.packing_efficiency == 16 / 17
    assert step_of([7], [5]).counts.microbatch_span == "1"


def test_a_plan_without_steps_or_rows_can_be_counted() -> None:
    plan = build_dp_schedule([1], layout=Layout(), micro_batch_size=1)
    for steps in ((), (step_of(),), (step_of([], []),)):
        counts = replace(plan, steps=steps).counts
        assert (counts.row_tokens, counts.microbatch_span, counts.padding_fraction) == (0, "0", 0)
    found = plan_report(replace(plan, steps=()))
    assert (found.num_steps, found.seconds, found.imbalance, found.peak_live_tokens) == (0, 0, 1, 0)


def test_without_lengths_equal_work_is_unknown() -> None:
    plan: Plan = build_dp_schedule([5, 3], layout=Layout(cp=2), max_tokens_per_gpu=6)
    found = plan_report(plan)
    assert found.time_over_equal_work is None
    assert found.totals()["seconds"] == found.seconds
    assert not {"steps", "rank_seconds"} & found.totals().keys()


def test_rows_over_the_budget_are_counted_and_left_out_of_fill() -> None:
    lengths = [50, 30, 500, 300, 100]
    plan = build_dp_schedule(lengths, layout=Layout(), max_tokens_per_gpu=100)
    report = plan_report(plan, lengths)
    within = report.num_rows - 2
    assert (report.num_rows_over, report.fill) == (2, pytest.approx(180 / (100 * within)))
    assert f"over the budget: 2 of {report.num_rows} rows, left out of fill" in report.lines()
    only = build_dp_schedule([500], layout=Layout(), max_tokens_per_gpu=100)
    assert (plan_report(only, [500]).fill, plan_report(only, [500]).num_rows_over) == (None, 1)
