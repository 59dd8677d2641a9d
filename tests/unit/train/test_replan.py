"""Settings with half the budget, after a step ran out of memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megapack import Layout, Policy, build_dp_schedule
from megapack.config.sections import PlanConfig
from megapack.cost.model import CostModel
from megapack.data.dataset import Dataset
from megapack.data.generated import generate_pairs
from megapack.errors import StepOutOfMemory
from megapack.plan.check import check_plan
from megapack.plan.plan import Plan
from megapack.train.passes import BatchPlanner, halved, replan_logprobs, replan_step

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


SIZES = {"tokens": {"max_tokens_per_gpu": 1500}, "count": {"micro_batch_size": 6}}


def planner_of_pairs(config: PlanConfig) -> BatchPlanner:
    data = Dataset.from_rollouts(generate_pairs(6, 2, seed=3))
    return BatchPlanner(config, Layout(dp=2), CostModel(0, 1e-6, 0, 0), data, dp_rank=0)


def rows_of(plan: Plan) -> list[tuple[int, ...]]:
    return [mb.samples for step in plan.steps for mb in step.microbatches if mb.samples]


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_replanned_rows_keep_pairs_and_fields(sizes: dict[str, int]) -> None:
    planner = planner_of_pairs(PlanConfig(**sizes, num_steps=2))
    numbers = np.arange(24)
    signs = planner.data.pair_signs(numbers)
    batch = planner.plan(numbers, {"pair_sign": signs, "number": numbers.tolist()})
    assert max(len(row) for row in rows_of(batch.plan)) >= 6
    smaller = replan_step(planner, batch, 1)
    kept = list(batch.plan.steps[1].kept_samples)
    assert smaller.numbers.tolist() == numbers[kept].tolist()
    rows = rows_of(smaller.plan)
    assert max(map(len, rows)) < max(len(row) for row in rows_of(batch.plan))
    field = smaller.samples.field
    for row in rows:
        # Samples 2k and 2k + 1 of the data are a pair, the first of them preferred.
        of_pair = sorted(int(field("number", i)) for i in row)
        assert of_pair[1::2] == [first + 1 for first in of_pair[::2]]
        for i in row:
            assert field("pair_sign", i) == (-1 if int(field("number", i)) % 2 else 1)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_rows_of_one_pair_cannot_be_halved(sizes: dict[str, int]) -> None:
    planner = planner_of_pairs(PlanConfig(**dict.fromkeys(sizes, 2)))
    batch = planner.plan(np.arange(24), {})
    assert {len(row) for row in rows_of(batch.plan)} == {2}
    with pytest.raises(StepOutOfMemory, match="each row holds one pair, of up to"):
        replan_step(planner, batch, 0)


def shared_tokens(plan: Plan) -> int:
    return plan.counts.shared_tokens


def test_replanned_rows_share_prefixes_of_their_own_samples() -> None:
    config = PlanConfig(
        max_tokens_per_gpu=3000, forward_max_tokens_per_gpu=6000, num_steps=2, share_prefixes="auto"
    )
    planner = planner_of_pairs(config)
    batch = planner.plan(np.arange(24), {})
    assert shared_tokens(batch.plan) > 0
    assert shared_tokens(batch.forward_plan) > 0
    lengths = batch.samples.lengths
    smaller = replan_step(planner, batch, 1)
    of_data = planner.prefixes(smaller.numbers)
    assert of_data is not None
    assert smaller.plan.prefixes is not None
    assert set(smaller.plan.prefixes.order) <= set(of_data.order)
    check_plan(smaller.plan, smaller.samples.lengths)
    assert shared_tokens(smaller.plan) > 0
    forward = replan_logprobs(planner, batch)
    check_plan(forward, lengths)
    assert shared_tokens(forward) > 0
    assert max(map(len, rows_of(forward))) < max(map(len, rows_of(batch.forward_plan)))


def wide_planner(dp: int, **settings: Any) -> BatchPlanner:
    config = PlanConfig(max_tokens_per_gpu=3000, context_parallel="dynamic", **settings)
    data = Dataset.from_rollouts(generate_pairs(6, 2, seed=3))
    return BatchPlanner(config, Layout(dp=dp), CostModel(0, 1e-6, 0, 0), data, dp_rank=0)


def test_a_row_over_several_ranks_counts_with_the_tokens_of_one() -> None:
    lengths = [400, *[20] * 10]
    policy = Policy(context_parallel="dynamic")
    plan = build_dp_schedule(lengths, layout=Layout(dp=4), max_tokens_per_gpu=100, policy=policy)
    assert plan.counts.widest == 4
    config = PlanConfig(max_tokens_per_gpu=100, context_parallel="dynamic")
    assert halved(config, plan.steps).max_tokens_per_gpu == 50


def test_the_longest_pair_fits_on_all_ranks_after_a_replan() -> None:
    planner = wide_planner(2)
    batch = planner.plan(np.arange(24), {})
    longest = max(
        sum(batch.samples.lengths[i] for i in (first, first + 1)) for first in range(0, 24, 2)
    )
    smaller = replan_step(planner, batch, 0)
    check_plan(smaller.plan, smaller.samples.lengths)
    assert smaller.plan.max_tokens_per_gpu is not None
    assert 2 * smaller.plan.max_tokens_per_gpu >= longest
    assert smaller.plan.max_tokens_per_gpu <= 1500


def test_rows_that_lie_over_all_ranks_cannot_be_halved() -> None:
    lengths = [400, *[20] * 10]
    policy = Policy(context_parallel="dynamic")
    plan = build_dp_schedule(lengths, layout=Layout(dp=2), max_tokens_per_gpu=200, policy=policy)
    config = PlanConfig(max_tokens_per_gpu=200, context_parallel="dynamic")
    with pytest.raises(StepOutOfMemory, match="one sample, of up to 200 padded tokens"):
        halved(config, plan.steps, least=200)
