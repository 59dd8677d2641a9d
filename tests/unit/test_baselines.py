"""Simple strategies, and what is foretold of them and of plans."""

from __future__ import annotations

import numpy as np
import pytest

from megapack import CostModel, Layout, build_dp_schedule, check_plan, simulate
from megapack.baselines import naive_steps, next_fit
from megapack.forecast import forecast
from megapack.plan import Plan

pytestmark = pytest.mark.unit

COST = CostModel(fixed=4.0, per_token=1.0, per_token_sq=1e-3)
RNG = np.random.default_rng(3)
LENGTHS = RNG.integers(1, 400, 90)


def make_plan(layout: Layout, **settings: int) -> Plan:
    settings = settings or {"max_tokens_per_gpu": 512}
    return build_dp_schedule(LENGTHS, layout=layout, num_steps=2, cost=COST, **settings)  # type: ignore[arg-type]


def test_next_fit_by_hand() -> None:
    sizes = np.array([3, 4, 5, 1, 9, 2, 2])
    # Rows of 3+4, 5+1, 9 and 2+2 tokens; with G=3 there must be six: the last that can are halved.
    assert next_fit(sizes, Layout(dp=2), 8) == [[[0, 1], [4]], [[2, 3], [5, 6]]]
    layout = Layout(dp=2, pp=3, vpp=2)
    assert next_fit(sizes, layout, 8) == [[[0, 1], [3], [5]], [[2], [4], [6]]]


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=3),
        Layout(dp=2, pp=4, vpp=2, microbatch_group_size=6),
        Layout(dp=2, cp=2, tp=2, sequence_parallel=True, fp8=True),
    ],
)
@pytest.mark.parametrize("settings", [{}, {"micro_batch_size": 3}])
def test_each_keeps_samples_budget_and_legal_counts(
    layout: Layout, settings: dict[str, int]
) -> None:
    plan = make_plan(layout, **settings)
    found = naive_steps(plan, LENGTHS)
    assert list(found) == ["next-fit", "padded", "one sample"]
    for name, steps in found.items():
        for step, ours in zip(steps, plan.steps, strict=True):
            assert step.kept_samples == ours.kept_samples
            assert len(step.ranks) == layout.dp
            assert layout.is_legal_count(int(step.num_microbatches or 0))
            assert {len(rank) for rank in step.ranks} == {step.num_microbatches}
            for mb in (mb for rank in step.ranks for mb in rank if mb.samples):
                longest = max(layout.aligned_sample_tokens(int(LENGTHS[i])) for i in mb.samples)
                taken = [int(LENGTHS[i]) for i in mb.samples]
                if name == "padded":
                    taken = [longest] * len(taken)
                assert mb.row_tokens == layout.padded_tokens(taken)
                assert settings or mb.row_tokens <= 512 * layout.cp
                assert len(mb.samples) <= {"one sample": 1}.get(name, 90)


def test_next_fit_under_a_plans_settings_is_a_plan() -> None:
    plan = make_plan(Layout(dp=2, pp=2, vpp=2))
    steps = naive_steps(plan, LENGTHS)["next-fit"]
    check_plan(Plan(**{**vars(plan), "steps": steps}), LENGTHS)


def test_a_forecast_sums_its_steps() -> None:
    layout = Layout(dp=2, pp=2, vpp=2, cp=2)
    plan = make_plan(layout)
    found = forecast(plan, plan.steps, LENGTHS, COST)
    runs = [simulate(step, layout=layout, cost=COST) for step in plan.steps]
    assert found.seconds == pytest.approx(sum(run.makespan for run in runs))
    assert found.tokens == LENGTHS.sum()
    assert found.num_rows + found.num_padding_rows == sum(
        2 * (step.num_microbatches or 0) for step in plan.steps
    )
    # Forward and twice that backward, of 1 token or 1/1000 squared token, over 8 GPUs.
    work = 3 * (LENGTHS.sum() + 1e-3 * (LENGTHS**2).sum()) / 8
    assert found.equal_work_seconds == pytest.approx(work)
    assert found.time_over_equal_work == pytest.approx(found.seconds / work)
    assert found.seconds > work
    assert found.imbalance >= 1
    assert 0 < (found.fill or 0) <= 1


def test_what_cannot_be_better_is_equal_work() -> None:
    lengths = np.full(32, 100)
    plan = build_dp_schedule(lengths, layout=Layout(dp=4), max_tokens_per_gpu=400)
    found = forecast(plan, plan.steps, lengths, CostModel(per_token=1.0))
    assert found.time_over_equal_work == pytest.approx(1.0)
    assert (found.imbalance, found.bubble_fraction, found.padding_fraction) == (1, 0, 0)
