"""Settings with half the budget, after a step ran out of memory."""

from __future__ import annotations

import pytest

from megapack import Layout, build_dp_schedule
from megapack.config.sections import PlanConfig
from megapack.errors import StepOutOfMemory
from megapack.train.passes import halved

pytestmark = pytest.mark.unit


def test_the_budget_is_half_of_the_largest_row() -> None:
    plan = build_dp_schedule([30, 20, 40, 10], layout=Layout(), max_tokens_per_gpu=60)
    config = halved(PlanConfig(max_tokens_per_gpu=60), plan.steps)
    largest = max(mb.padded_tokens for mb in plan.steps[0].ranks[0])
    assert config.max_tokens_per_gpu == config.forward_max_tokens_per_gpu == largest // 2


def test_the_largest_row_is_halved_not_a_larger_budget() -> None:
    plan = build_dp_schedule([5, 5], layout=Layout(), max_tokens_per_gpu=1_000_000)
    assert halved(PlanConfig(max_tokens_per_gpu=1_000_000), plan.steps).max_tokens_per_gpu == 5


def test_count_based_rows_have_half_the_samples() -> None:
    plan = build_dp_schedule([5] * 8, layout=Layout(), micro_batch_size=4)
    config = halved(PlanConfig(micro_batch_size=4), plan.steps)
    assert config == PlanConfig(micro_batch_size=2)


def test_a_forward_budget_beside_counts_is_halved_too() -> None:
    plan = build_dp_schedule([30, 30, 20, 40], layout=Layout(), max_tokens_per_gpu=60)
    config = halved(PlanConfig(micro_batch_size=3, forward_max_tokens_per_gpu=60), plan.steps)
    assert config == PlanConfig(micro_batch_size=1, forward_max_tokens_per_gpu=30)


def test_rows_of_one_sample_cannot_be_halved() -> None:
    plan = build_dp_schedule([50, 60], layout=Layout(), max_tokens_per_gpu=64)
    with pytest.raises(
        StepOutOfMemory, match=r"one sample, of up to 60 padded tokens; set"
    ) as raised:
        halved(PlanConfig(max_tokens_per_gpu=64), plan.steps)
    assert raised.value.on_all_ranks
