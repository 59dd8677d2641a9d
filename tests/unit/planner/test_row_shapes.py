"""Rows of few lengths: `Policy.row_shapes`, `RowShapes`, and their choice."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
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
    simulate,
)
from megapack.outlook.stats import step_report
from megapack.pipeline.simulator import simulate_planned
from megapack.plan import RowShape, RowShapes
from megapack.plan.shapes import choose_lengths

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
    shapes: RowShapes | None = None,
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
        row_shapes=shapes,
        num_steps=num_steps,
    )


def rows_of(plan: Plan) -> list[MicroBatch]:
    return [mb for step in plan.steps for mb in step.microbatches]


def shapes_of(plan: Plan) -> RowShapes:
    assert plan.row_shapes is not None
    return plan.row_shapes


def lengths_per_gpu(plan: Plan) -> set[float]:
    return {mb.row_tokens / mb.width / plan.layout.cp for mb in rows_of(plan)}


class TestChoice:
    @pytest.mark.parametrize("seed", range(6))
    def test_the_lengths_pad_the_least_of_all(self, seed: int) -> None:
        draw = random.Random(seed)
        rows = [draw.randint(1, 40) for _ in range(draw.randint(1, 30))]
        longest = max(rows) + draw.randint(0, 3)

        def padded(lengths: Any) -> int:
            return sum(min(length for length in lengths if length >= row) for row in rows)

        others = sorted({*rows} - {longest})
        for most in (1, 2, 3, 4):
            found = choose_lengths(rows, most, longest)
            assert found == sorted(set(found))
            assert found[-1] == longest
            assert len(found) <= most
            all_choices = (
                padded((*inner, longest))
                for count in range(most)
                for inner in itertools.combinations(others, count)
            )
            assert padded(found) == min(all_choices)

    def test_a_thousand_lengths_take_milliseconds_of_integers(self) -> None:
        rows = np.random.default_rng(0).integers(1, 2**40, 1000).tolist()
        found = choose_lengths(rows, 16, 2**40)
        assert len(found) == 16
        assert all(type(length) is int for length in found)

    def test_more_shapes_than_lengths_pad_nothing(self) -> None:
        assert choose_lengths([3, 3, 7], 9, 10) == [3, 7, 10]


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
@pytest.mark.parametrize("most", [1, 3])
def test_rows_have_at_most_so_many_lengths(
    layout: Layout, settings: dict[str, Any], most: int
) -> None:
    goes_on = {"context_parallel", "split_samples"} & settings.keys()
    lengths = [*LENGTHS, 700, 900] if goes_on else LENGTHS
    if "max_live_tokens_per_gpu" in settings:
        lengths = [min(length, 250) for length in lengths]
    plan = planned(layout, lengths, row_shapes=most, **settings)
    check_plan(plan, lengths)
    assert plan.row_shapes is not None
    assert lengths_per_gpu(plan) <= set(plan.row_shapes.tokens)
    assert len(plan.row_shapes.shapes) <= most
    assert plan.capacity is not None
    assert all(mb.padded_tokens <= plan.capacity * mb.width for mb in rows_of(plan))
    assert plan.capacity <= BUDGET * layout.cp
    for read in (Plan.from_json(plan.to_json()), Plan.from_text(str(plan))):
        assert read == plan
        assert read.digest() == plan.digest()
    if layout.dp == 4:
        assert any(mb.width > 1 for mb in rows_of(plan))
    if layout.pp == 4:
        assert any(mb.pieces for mb in rows_of(plan))


def test_more_lengths_cost_less() -> None:
    layout = Layout(dp=2, pp=2)

    def seconds(**settings: Any) -> float:
        plan = planned(layout, **settings)
        return simulate(plan.steps[0], layout=layout, cost=COST).makespan

    assert seconds() < seconds(row_shapes=8) < seconds(row_shapes=1)


def test_a_plan_with_the_shapes_of_another_keeps_its_lengths() -> None:
    layout = Layout(dp=2, pp=2)
    first = planned(layout, row_shapes=3, num_steps=2)
    shapes = first.next_row_shapes
    assert first.row_shapes is not None
    assert shapes is not None
    assert shapes.num_steps == 2
    later = [length + 7 for length in LENGTHS[::-1]]
    second = planned(layout, later, shapes=shapes, row_shapes=3)
    check_plan(second, later)
    assert second.row_shapes is not None
    assert second.row_shapes.tokens == first.row_shapes.tokens
    assert second.row_shapes.num_steps == 2
    again = planned(layout, later, shapes=second.row_shapes, row_shapes=3)
    assert again == second


def test_lengths_are_chosen_again_after_the_interval() -> None:
    layout = Layout(dp=2)
    first = planned(layout, row_shapes=2, row_shapes_interval=2)
    assert first.next_row_shapes is not None
    short = [length // 4 + 1 for length in LENGTHS]
    kept = planned(layout, short, shapes=first.next_row_shapes, row_shapes=2, row_shapes_interval=2)
    new = planned(layout, short, shapes=kept.next_row_shapes, row_shapes=2, row_shapes_interval=2)
    tokens = [shapes_of(plan).tokens for plan in (first, kept, new)]
    assert tokens[0] == tokens[1] != tokens[2]
    assert shapes_of(new).num_steps == 0
    assert new.row_shapes == planned(layout, short, row_shapes=2, row_shapes_interval=2).row_shapes


def test_segments_grow_with_the_samples_of_rows_and_never_shrink() -> None:
    layout = Layout()
    few = planned(layout, [240] * 8, row_shapes=1)
    many = planned(layout, [9] * 400, row_shapes=1, shapes=few.next_row_shapes)
    back = planned(layout, [240] * 8, row_shapes=1, shapes=many.next_row_shapes)
    assert shapes_of(few).shapes == (RowShape(500, 4, 256),)
    assert shapes_of(many).shapes == shapes_of(back).shapes == (RowShape(500, 64, 256),)
    longest = max(len(mb.samples) for mb in rows_of(many))
    assert 32 < longest <= 64


def test_branches_of_shared_prefixes_count_as_segments() -> None:
    lengths = [len(tokens) for tokens in TOKENS]
    plan = planned(Layout(), lengths, prefixes=SharedPrefixes.from_samples(TOKENS), row_shapes=2)
    check_plan(plan, lengths)
    assert sum(mb.shared_tokens for mb in rows_of(plan)) > 1000
    assert plan.row_shapes is not None
    most = max(len(mb.samples) for mb in rows_of(plan))
    assert plan.row_shapes.shapes[-1].segments > most


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        (Layout(dp=2), {}),
        (Layout(dp=3, cp=2), {"row_shape": "uniform"}),
        (Layout(pp=2, vpp=2, microbatch_group_size=3), {"count_rule": "multiple"}),
        (Layout(dp=2, pp=2), {"backward": "split"}),
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
        assert mb.row_tokens == shapes_of(plan).tokens[0] * layout.cp
    for read in (Plan.from_json(plan.to_json()), Plan.from_text(str(plan))):
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
    ("shapes", "settings", "message"),
    [
        (None, {"row_shapes": 0}, "row_shapes=0; set an integer of at least 1"),
        (None, {"row_shapes": 1, "row_shapes_interval": 0}, "row_shapes_interval=0"),
        ((300, 500), {}, r"Policy\(row_shapes=None\)"),
        ((300, 500), {"row_shapes": 1}, "2 row shapes are given"),
        ((304, 501), {"row_shapes": 2}, "501 tokens per GPU.*row alignment of 16; set 512"),
        ((512,), {"row_shapes": 2}, "max_tokens_per_gpu=500.*row alignment of 1024 tokens"),
        ((500, 300), {"row_shapes": 2}, "give ascending lengths"),
    ],
)
def test_what_does_not_fit_is_refused(
    shapes: tuple[int, ...] | None, settings: dict[str, Any], message: str
) -> None:
    layout = Layout(cp=2, fp8=True)
    with pytest.raises(ConfigError, match=message):
        planned(layout, shapes=shapes and RowShapes(tuple(map(RowShape, shapes))), **settings)


def test_rows_of_a_number_of_samples_are_refused() -> None:
    with pytest.raises(ConfigError, match="row_shapes=2 with micro_batch_size=3"):
        build_dp_schedule(LENGTHS, layout=Layout(), micro_batch_size=3, policy=Policy(row_shapes=2))


class TestCheck:
    plan = planned(Layout(dp=2), row_shapes=2)

    def refused(self, plan: Plan, message: str) -> None:
        with pytest.raises(PlanError, match=message):
            check_plan(plan, LENGTHS)

    def test_a_plan_without_its_shapes(self) -> None:
        self.refused(replace(self.plan, row_shapes=None), "invariant")

    def test_more_shapes_than_the_policy_allows(self) -> None:
        self.refused(replace(self.plan, policy=Policy(row_shapes=1, search=100)), "invariant 12")

    def test_too_few_segments(self) -> None:
        assert self.plan.row_shapes is not None
        few = RowShapes(tuple(shape._replace(segments=1) for shape in self.plan.row_shapes.shapes))
        self.refused(replace(self.plan, row_shapes=few), "invariant 12.*rows need the shapes")

    def test_a_row_of_another_length(self) -> None:
        assert self.plan.row_shapes is not None
        (first, *rows), *ranks = self.plan.steps[0].ranks
        longer = replace(first, row_tokens=first.row_tokens + 1)
        step = replace(self.plan.steps[0], ranks=((longer, *rows), *ranks))
        self.refused(replace(self.plan, steps=(step,)), "invariant 5")


def test_without_shapes_a_plan_keeps_its_digest() -> None:
    assert "row_shapes" not in Policy().to_payload()
    assert "row_shapes" not in planned(Layout(dp=2)).to_json()


def test_explain_compares_plans_of_the_same_shapes() -> None:
    explained = planned(Layout(dp=2, pp=2), row_shapes=2).explain()
    assert explained.gains
