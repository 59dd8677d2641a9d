"""Simple packing strategies."""

from __future__ import annotations

import numpy as np
import pytest

from megapack import CostModel, Layout, build_dp_schedule, check_plan
from megapack.outlook.baselines import naive_plans, next_fit
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
    # Rows of 3+4, 5+1, 9 and 2+2 tokens. G=3 needs six: the last rows with two samples are halved.
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
def test_strategies_keep_samples_budget_and_legal_counts(
    layout: Layout, settings: dict[str, int]
) -> None:
    plan = make_plan(layout, **settings)
    found = naive_plans(plan, LENGTHS)
    assert list(found) == ["next-fit", "padded", "one sample"]
    for name, packed in found.items():
        for step, ours in zip(packed.steps, plan.steps, strict=True):
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
    check_plan(naive_plans(plan, LENGTHS)["next-fit"], LENGTHS)
