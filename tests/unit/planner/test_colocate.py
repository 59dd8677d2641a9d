"""Samples with the same colocate id stay in one micro-batch."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from megapack import (
    ConfigError,
    CostModel,
    Layout,
    Plan,
    PlanError,
    Policy,
    build_dp_schedule,
    check_plan,
)

pytestmark = pytest.mark.unit

COST = CostModel(fixed=64.0, per_token=1.0, per_token_sq=1e-3, per_sample=3.0)
LENGTHS = [1 + (i * 31) % 43 for i in range(48)]
PAIRS = [i // 2 for i in range(48)]
# The two samples of a pair are far apart in the input.
SPREAD = [i % 24 for i in range(48)]


def together(plan: Plan) -> bool:
    assert plan.colocate_ids is not None
    rows = [mb.samples for step in plan.steps for rank in step.ranks for mb in rank]
    row_of = {i: row for row, samples in enumerate(rows) for i in samples}
    rows_of_id: dict[Any, set[int]] = {}
    for i, row in row_of.items():
        rows_of_id.setdefault(plan.colocate_ids[i], set()).add(row)
    return all(len(rows) == 1 for rows in rows_of_id.values())


@pytest.mark.parametrize("ids", [PAIRS, SPREAD], ids=["neighbours", "spread"])
@pytest.mark.parametrize("policy", [Policy(), Policy(search=0), Policy(row_shape="uniform")])
@pytest.mark.parametrize("layout", [Layout(dp=2, pp=2, vpp=2), Layout(dp=2, cp=2)], ids=str)
def test_pairs_stay_together(layout: Layout, policy: Policy, ids: list[int]) -> None:
    plan = build_dp_schedule(
        LENGTHS,
        layout=layout,
        max_tokens_per_gpu=200,
        cost=COST,
        policy=policy,
        colocate_ids=ids,
    )
    check_plan(plan, LENGTHS)
    assert together(plan)
    assert max(len(mb.samples) for rank in plan.steps[0].ranks for mb in rank) > 2


def test_a_set_larger_than_the_micro_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"3 samples share the colocate id 'a'.*set it to 3"):
        build_dp_schedule(
            [4] * 4, layout=Layout(), micro_batch_size=2, colocate_ids=["b", "a", "a", "a"]
        )


def test_without_rollout_ids_a_set_is_a_rollout() -> None:
    plan = build_dp_schedule(
        [4] * 8,
        layout=Layout(),
        max_tokens_per_gpu=64,
        colocate_ids=["a", "b", "a", "b", "c", "c", "d", "d"],
        global_batch_size=2,
    )
    check_plan(plan, [4] * 8)
    assert [step.kept_rollouts for step in plan.steps] == [("a", "b"), ("c", "d")]


def test_a_set_over_the_budget_is_alone_in_its_row() -> None:
    arguments: dict[str, Any] = {
        "layout": Layout(dp=2, pp=2),
        "max_tokens_per_gpu": 64,
        "colocate_ids": [0, 0, *range(1, 20)],
    }
    lengths = [40, 50, *[8] * 19]
    plan = build_dp_schedule(lengths, **arguments)
    check_plan(plan, lengths)
    assert (0, 1) in [mb.samples for rank in plan.steps[0].ranks for mb in rank]
    with pytest.raises(PlanError, match=r"samples \[0, 1\] of colocate id 0: 90 tokens"):
        build_dp_schedule(lengths, **arguments, policy=Policy(oversize="error"))


def test_json_and_text_have_colocate_ids_only_if_given() -> None:
    plain = build_dp_schedule([4] * 4, layout=Layout(), max_tokens_per_gpu=64)
    assert "colocate" not in plain.to_json() + str(plain)
    plan = build_dp_schedule(
        [4] * 4, layout=Layout(), max_tokens_per_gpu=64, colocate_ids=["a", 1, "a", 1]
    )
    assert plan.colocate_ids == ("a", 1, "a", 1)
    assert plan.digest() != plain.digest()
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(PlanError, match="colocate_ids must be"):
        Plan.from_json(plan.to_json().replace('"colocate_ids":["a"', '"colocate_ids":[null'))


def test_a_set_in_two_rows_breaks_invariant_7() -> None:
    plan = build_dp_schedule([4] * 4, layout=Layout(dp=2), max_tokens_per_gpu=64)
    torn = [plan.steps[0].ranks[0][0].samples[0], plan.steps[0].ranks[1][0].samples[0]]
    ids = tuple("pair" if i in torn else f"{i}" for i in range(4))
    step = dataclasses.replace(plan.steps[0], kept_rollouts=tuple(dict.fromkeys(ids)))
    broken = dataclasses.replace(plan, colocate_ids=ids, steps=(step,))
    place = r"invariant 7 .* 'pair' .* step 0 rank 0 micro-batch 0 .* step 0 rank 1 micro-batch 0"
    with pytest.raises(PlanError, match=place):
        check_plan(broken, [4] * 4)
