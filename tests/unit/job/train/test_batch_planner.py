"""Plans of batches of preference pairs: a pair is in one row, and samples keep their fields."""

from __future__ import annotations

import numpy as np
import pytest

from megapack import Layout
from megapack.cost.model import CostModel
from megapack.job.config.sections import PlanConfig
from megapack.job.data.dataset import Dataset
from megapack.job.data.generated import generate_pairs
from megapack.job.train.passes import BatchPlanner
from megapack.plan.check import check_plan
from megapack.plan.plan import Plan

pytestmark = pytest.mark.unit

SIZES = {"tokens": {"max_tokens_per_gpu": 1500}, "count": {"micro_batch_size": 6}}


def planner_of_pairs(config: PlanConfig) -> BatchPlanner:
    data = Dataset.from_rollouts(generate_pairs(6, 2, seed=3))
    return BatchPlanner(config, Layout(dp=2), CostModel(0, 1e-6, 0, 0), data, dp_rank=0)


def rows_of(plan: Plan) -> list[tuple[int, ...]]:
    return [mb.samples for step in plan.steps for mb in step.microbatches if mb.samples]


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_rows_keep_pairs_and_fields(sizes: dict[str, int]) -> None:
    planner = planner_of_pairs(PlanConfig(**sizes, num_steps=2))
    numbers = np.arange(24)
    signs = planner.data.pair_signs(numbers)
    batch = planner.plan(numbers, {"pair_sign": signs, "number": numbers.tolist()})
    rows = rows_of(batch.plan)
    assert max(map(len, rows)) >= 6
    field = batch.samples.field
    for row in rows:
        # Samples 2k and 2k + 1 of the data are a pair, the first of them preferred.
        of_pair = sorted(int(field("number", i)) for i in row)
        assert of_pair[1::2] == [first + 1 for first in of_pair[::2]]
        for i in row:
            assert field("pair_sign", i) == (-1 if int(field("number", i)) % 2 else 1)


def test_rows_of_both_plans_share_prefixes() -> None:
    config = PlanConfig(
        max_tokens_per_gpu=3000, forward_max_tokens_per_gpu=6000, num_steps=2, share_prefixes="auto"
    )
    batch = planner_of_pairs(config).plan(np.arange(24), {})
    for plan in (batch.plan, batch.forward_plan):
        check_plan(plan, batch.samples.lengths)
        assert plan.counts.shared_tokens > 0
    assert max(map(len, rows_of(batch.plan))) < max(map(len, rows_of(batch.forward_plan)))
