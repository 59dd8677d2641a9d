"""Rows of few lengths: `Policy.row_shapes`."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from megapack import (
    ConfigError,
    CostModel,
    Layout,
    MicroBatch,
    Plan,
    PlanError,
    Policy,
    SharedPrefixes,
    build_dp_schedule,
    check_plan,
)
from megapack.outlook.stats import step_report
from megapack.pipeline.simulator import simulate_planned

pytestmark = pytest.mark.unit

BUDGET = 500
COST = CostModel(fixed=50.0, per_token=1.0, per_token_sq=1e-3, per_sample=0.0)
RNG = random.Random(3)
LENGTHS = [RNG.randint(5, 300) for _ in range(60)]
PROMPTS = [[RNG.randrange(90) for _ in range(80)] for _ in range(12)]
TOKENS = [
    PROMPTS[i // 4] + [RNG.randrange(90) for _ in range(RNG.randint(5, 60))] for i in range(48)
]


def planned(
    layout: Layout,
    lengths: list[int] = LENGTHS,
    *,
    prefixes: Any = None,
    num_steps: int | None = None,
    **settings: Any,
) -> Plan:
    return build_dp_schedule(
        lengths,
        layout=layout,
        max_tokens_per_gpu=BUDGET,
        cost=COST,
        policy=Policy(search=100, **settings),
        prefixes=prefixes,
        num_steps=num_steps,
    )


def rows_of(plan: Plan) -> list[MicroBatch]:
    return [mb for step in plan.steps for mb in step.microbatches]


def lengths_per_gpu(plan: Plan) -> set[float]:
    return {mb.row_tokens / mb.width / plan.layout.cp for mb in rows_of(plan)}


@pytest.mark.parametrize(
    ("layout", "settings", "longest", "lengths"),
    [
        (Layout(), {"row_shapes": 1}, 500, (500,)),
        (Layout(), {"row_shapes": 4}, 500, (125, 250, 375, 500)),
        (Layout(cp=2, fp8=True), {"row_shapes": 3}, 500, (80, 160, 240)),
        (Layout(), {"row_shapes": 3, "round_row_tokens": 100}, 500, (200, 400, 500)),
        (Layout(dp=4), {"row_shapes": 2, "context_parallel": "dynamic"}, 500, (250, 500)),
        (Layout(), {"row_shapes": 8}, 3, (1, 2, 3)),
        (Layout(), {}, 500, ()),
    ],
)
def test_lengths_are_equal_parts_of_the_longest_row(
    layout: Layout, settings: dict[str, Any], longest: int, lengths: tuple[int, ...]
) -> None:
    assert Policy(**settings).row_lengths(layout, longest) == lengths


CASES: list[tuple[Layout, dict[str, Any]]] = [
    (Layout(dp=2), {}),
    (Layout(dp=2, pp=2, vpp=2, cp=2), {"row_shape": "uniform"}),
    (Layout(dp=2, tp=2, sequence_parallel=True, fp8=True), {}),
    (Layout(dp=4, pp=2), {"context_parallel": "dynamic"}),
    (Layout(dp=2, pp=4), {"split_samples": "auto"}),
    (Layout(dp=2, pp=2, vpp=2), {"round_row_tokens": 32}),
    (Layout(dp=2, pp=2), {"max_live_tokens_per_gpu": 700}),
]


@pytest.mark.parametrize(("layout", "settings"), CASES)
@pytest.mark.parametrize("most", [3])
def test_rows_have_at_most_so_many_lengths(
    layout: Layout, settings: dict[str, Any], most: int
) -> None:
    goes_on = {"context_parallel", "split_samples"} & settings.keys()
    lengths = [*LENGTHS, 700, 900] if goes_on else LENGTHS
    if "max_live_tokens_per_gpu" in settings:
        lengths = [min(length, 250) for length in lengths]
    plan = planned(layout, lengths, row_shapes=most, **settings)
    check_plan(plan, lengths)
    assert lengths_per_gpu(plan) <= set(plan.row_lengths)
    assert len(plan.row_lengths) <= most
    assert plan.capacity is not None
    assert all(mb.padded_tokens <= plan.capacity * mb.width for mb in rows_of(plan))
    assert plan.capacity <= BUDGET * layout.cp
    read = Plan.from_json(plan.to_json())
    assert read == plan
    assert read.digest() == plan.digest()
    if layout.dp == 4:
        assert any(mb.width > 1 for mb in rows_of(plan))
    if layout.pp == 4:
        assert any(mb.pieces for mb in rows_of(plan))


def test_rows_with_shared_prefixes_have_the_lengths() -> None:
    lengths = [len(tokens) for tokens in TOKENS]
    plan = planned(Layout(), lengths, prefixes=SharedPrefixes.from_samples(TOKENS), row_shapes=2)
    check_plan(plan, lengths)
    assert sum(mb.shared_tokens for mb in rows_of(plan)) > 1000
    assert lengths_per_gpu(plan) <= {250, 500}


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        (Layout(dp=2), {}),
        (Layout(pp=2, vpp=2, microbatch_group_size=3), {"count_rule": "multiple"}),
        (Layout(dp=3, pp=2), {"context_parallel": "dynamic"}),
    ],
)
@pytest.mark.parametrize("most", [1, 3])
def test_a_padding_micro_batch_has_the_shortest_length_and_no_tokens(
    layout: Layout, settings: dict[str, Any], most: int
) -> None:
    plan = planned(layout, [53], row_shapes=most, **settings)
    check_plan(plan, [53])
    (step,) = plan.steps
    padding = [mb for mb in step.microbatches if not mb.samples]
    assert padding
    for mb in padding:
        assert (mb.tokens, mb.tokens_sq, mb.padded_tokens) == (0, 0, 0)
        assert mb.row_tokens == plan.row_lengths[0] * layout.cp
    read = Plan.from_json(plan.to_json())
    assert read == plan
    check_plan(read, [53])
    report = step_report(plan, step, COST)
    assert report.tokens == 53
    assert report.seconds == simulate_planned(plan, step, COST).makespan


def test_a_sample_over_the_budget_is_refused() -> None:
    with pytest.raises(
        PlanError, match=r"over the budget.*raise max_tokens_per_gpu or set row_sha"
    ):
        planned(Layout(), [501], row_shapes=2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"row_shapes": 0}, "row_shapes=0; set an integer of at least 1"),
        (
            {"row_shapes": 1, "round_row_tokens": 1024},
            "max_tokens_per_gpu=500.*row alignment of 1024 tokens",
        ),
    ],
)
def test_what_does_not_fit_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(Layout(cp=2, fp8=True), **settings)


def test_rows_of_other_lengths_than_the_plan_says_break_an_invariant() -> None:
    plan = planned(Layout(dp=2), row_shapes=2)
    (first, *rows), *ranks = plan.steps[0].ranks
    longer = replace(first, row_tokens=first.row_tokens + 1)
    step = replace(plan.steps[0], ranks=((longer, *rows), *ranks))
    for broken, message in (
        (replace(plan, row_lengths=()), "invariant"),
        (replace(plan, policy=Policy(row_shapes=1, search=100)), "invariant 12"),
        (replace(plan, row_lengths=plan.row_lengths[::-1]), "invariant"),
        (replace(plan, steps=(step,)), "invariant 5"),
    ):
        with pytest.raises(PlanError, match=message):
            check_plan(broken, LENGTHS)
