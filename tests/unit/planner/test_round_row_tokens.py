"""Rows that are rounded to a multiple of `Policy.round_row_tokens`."""

from __future__ import annotations

import random
from typing import Any

import pytest

from megapack import (
    ConfigError,
    CostModel,
    Layout,
    Plan,
    Policy,
    SharedPrefixes,
    build_dp_schedule,
    check_plan,
)

pytestmark = pytest.mark.unit

UNIT = 96
BUDGET = 500
COST = CostModel(fixed=50.0, per_token=1.0, per_token_sq=1e-3, per_sample=0.0)
RNG = random.Random(3)
LENGTHS = [RNG.randint(5, 300) for _ in range(60)] + [700, 1200]
PROMPTS = [[RNG.randrange(90) for _ in range(80)] for _ in range(12)]
TOKENS = [
    PROMPTS[i // 4] + [RNG.randrange(90) for _ in range(RNG.randint(5, 60))] for i in range(48)
]


def planned(layout: Layout, lengths: list[int], prefixes: Any = None, **settings: Any) -> Plan:
    policy = Policy(round_row_tokens=UNIT, search=100, **settings)
    return build_dp_schedule(
        lengths,
        layout=layout,
        max_tokens_per_gpu=BUDGET,
        cost=COST,
        policy=policy,
        prefixes=prefixes,
    )


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        (Layout(dp=2), {}),
        (Layout(dp=2, pp=2, vpp=2, cp=2), {"row_shape": "uniform"}),
        (Layout(dp=2, tp=2, sequence_parallel=True, fp8=True), {}),
        (Layout(dp=4, pp=2), {"context_parallel": "dynamic"}),
        (Layout(dp=2, pp=4), {"split_samples": "auto"}),
        (Layout(dp=2, pp=2), {"max_live_tokens_per_gpu": 1000}),
    ],
)
def test_rows_have_few_lengths_and_the_budget_holds(
    layout: Layout, settings: dict[str, Any]
) -> None:
    goes_on = {"context_parallel", "split_samples", "count_rule"} & settings.keys()
    lengths = LENGTHS if goes_on or not settings else LENGTHS[:60]
    plan = planned(layout, lengths, **settings)
    check_plan(plan, lengths)
    unit = layout.rounding(UNIT).row_alignment
    assert plan.capacity == BUDGET * layout.cp // unit * unit
    rows = [mb for step in plan.steps for mb in step.microbatches]
    assert all(mb.row_tokens % UNIT == 0 for mb in rows)
    assert len({mb.row_tokens for mb in rows}) <= 12
    for mb in rows:
        is_alone = len(mb.samples) == 1 and mb.width == 1
        assert mb.row_tokens <= plan.capacity * mb.width or is_alone
    assert Plan.from_json(plan.to_json()) == plan


def test_shared_prefixes_count_once_before_rounding() -> None:
    lengths = [len(tokens) for tokens in TOKENS]
    prefixes = SharedPrefixes.from_samples(TOKENS)
    plan = planned(Layout(dp=2), lengths, prefixes)
    check_plan(plan, lengths)
    rows = [mb for step in plan.steps for mb in step.microbatches]
    assert sum(mb.shared_tokens for mb in rows) > 1000
    assert all(mb.row_tokens % UNIT == 0 and mb.row_tokens <= 480 for mb in rows)


def test_a_budget_below_the_rounding_is_refused() -> None:
    with pytest.raises(ConfigError, match="less than the row alignment of 1024 tokens"):
        build_dp_schedule(
            [5],
            layout=Layout(),
            max_tokens_per_gpu=1000,
            policy=Policy(round_row_tokens=1024),
        )
