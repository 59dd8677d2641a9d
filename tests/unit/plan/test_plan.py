from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from megapack import (
    Layout,
    MicroBatch,
    Plan,
    PlanError,
    Policy,
    StepPlan,
    build_dp_schedule,
    check_plan,
)

pytestmark = pytest.mark.unit

LENGTHS = [5, 9, 30, 2, 17, 8, 8, 21, 3, 12, 40, 6]
IDS = ["a", "b", "a", 7, 7, "c", "c", "d", "d", "d", "e", "f"]


@pytest.fixture
def plan() -> Plan:
    return build_dp_schedule(
        LENGTHS, layout=Layout(dp=2, pp=2), max_tokens_per_gpu=40, rollout_ids=IDS
    )


def test_json_is_exact(plan: Plan) -> None:
    for policy in (Policy(), Policy(row_shape="uniform")):
        for steps in (1, 3):
            again = build_dp_schedule(
                LENGTHS,
                layout=Layout(dp=3, pp=2, vpp=2),
                max_tokens_per_gpu=40,
                num_steps=steps,
                policy=policy,
            )
            read = Plan.from_json(again.to_json())
            assert read == again
            assert (read.digest(), str(read)) == (again.digest(), str(again))
    assert Plan.from_json(plan.to_json()).rollout_ids == tuple(IDS)


def test_tokens_without_samples_are_parsed_and_reported(plan: Plan) -> None:
    empty = {"samples": (), "tokens": 0, "tokens_sq": 0, "padded_tokens": 0}
    for wrong in ({"tokens": 1}, {"tokens_sq": 5}, {"padded_tokens": 30}):
        edited = _mb(plan, **{**empty, **wrong})
        assert Plan.from_json(edited.to_json()) == edited
        with pytest.raises(PlanError, match="invariant"):
            check_plan(edited, LENGTHS)


def test_different_plans_have_different_digests(plan: Plan) -> None:
    assert plan.digest() == Plan.from_json(plan.to_json()).digest()
    assert plan.digest() != dataclasses.replace(plan, max_tokens_per_gpu=41).digest()


@pytest.mark.parametrize(
    ("damage", "place"),
    [
        (lambda text: text.replace('"dp":2', '"pd":2'), "pd"),
        (lambda text: text.replace('"group_size":null', '"group_size":"x"'), "steps.0.*group_size"),
        (lambda text: text.replace('"ranks":[[[[', '"ranks":[[[["a",'), r"steps.0..ranks.0..0."),
        (lambda text: "[" * 5000, "brackets too deep"),
        (lambda text: text.replace('"dp":2', '"dp":' + "[" * 400 + "]" * 400), "dp="),
        (lambda text: text.replace('"dp":2', '"dp":2,"dp":4'), "'dp' appears twice"),
        (lambda text: text.replace('"dp":2', '"a\\nb":2'), "layout must be an object of"),
        (lambda text: text.replace('"search":2048', '"a\\nb":2'), "policy must be an object of"),
        (lambda text: text.replace("[[[[", f"[[[[{10**30},"), r"steps.0..ranks.0..0."),
    ],
)
def test_json_errors_say_where(plan: Plan, damage: Any, place: str) -> None:
    with pytest.raises(PlanError, match=place) as caught:
        Plan.from_json(damage(plan.to_json()))
    assert len(str(caught.value).splitlines()) == 1


def test_absent_settings_get_their_defaults(plan: Plan) -> None:
    older = plan.to_json().replace(',"group_size":"fixed","max_live_tokens_per_gpu":null', "")
    assert older != plan.to_json()
    assert Plan.from_json(older) == plan


@pytest.mark.parametrize("ids", [range(2**63 - 12, 2**63), range(-5, 7), ["\n", "\ud800"] * 6])
def test_ids_of_any_kind_survive_json(ids: Any) -> None:
    plan = build_dp_schedule(LENGTHS, layout=Layout(), max_tokens_per_gpu=40, rollout_ids=list(ids))
    assert Plan.from_json(plan.to_json()) == plan


def _step(plan: Plan, **changes: Any) -> Plan:
    return dataclasses.replace(plan, steps=(_changed(plan.steps[0], **changes), *plan.steps[1:]))


def _changed(step: StepPlan, **changes: Any) -> StepPlan:
    return dataclasses.replace(step, **changes)


def _mb(plan: Plan, **changes: Any) -> Plan:
    ranks = plan.steps[0].ranks
    first = dataclasses.replace(ranks[0][0], **changes)
    return _step(plan, ranks=((first, *ranks[0][1:]), *ranks[1:]))


def _padding(step: StepPlan) -> StepPlan:
    ranks = tuple((MicroBatch((), 1, 0, 0, 0),) for _ in step.ranks)
    return StepPlan(ranks, 1, None, (), ())


def _breakages(plan: Plan) -> dict[str, tuple[int, Plan]]:
    step = plan.steps[0]
    ranks = step.ranks
    row = ranks[0][0]
    return {
        "a rank with another M": (1, _step(plan, ranks=(ranks[0][:-1], ranks[1]))),
        "an empty rank": (1, _step(plan, ranks=((), ()), num_microbatches=0)),
        "a rank too many": (1, _step(plan, ranks=(*ranks, ranks[0]))),
        "another M than it says": (1, _step(plan, num_microbatches=99)),
        "a group size without chunks": (1, _step(plan, group_size=2)),
        "a sample twice": (2, _step(plan, ranks=(ranks[0], ranks[0]))),
        "a step without samples": (2, dataclasses.replace(plan, steps=(step, _padding(step)))),
        "a sample from nowhere": (2, _mb(plan, samples=(*row.samples, 99))),
        "a dropped stranger": (2, _step(plan, dropped_rollouts=("z",))),
        "a rollout forgotten": (3, _step(plan, kept_rollouts=step.kept_rollouts[1:])),
        "rollouts out of order": (3, _step(plan, kept_rollouts=step.kept_rollouts[::-1])),
        "wrong tokens": (4, _mb(plan, tokens=row.tokens + 1)),
        "wrong squares": (4, _mb(plan, tokens_sq=1)),
        "a row over the budget": (4, dataclasses.replace(plan, max_tokens_per_gpu=39)),
        "a planned row that is longer": (5, _mb(plan, row_tokens=row.row_tokens + 1)),
        "a row too short": (5, _mb(plan, row_tokens=row.row_tokens - 1)),
    }


def test_each_broken_invariant_is_named(plan: Plan) -> None:
    check_plan(plan, LENGTHS)
    for number, broken in _breakages(plan).values():
        strict = dataclasses.replace(broken, policy=Policy(oversize="error"))
        with pytest.raises(PlanError, match=f"invariant {number} "):
            check_plan(strict, LENGTHS)


def test_uniform_rows_have_one_length(plan: Plan) -> None:
    uniform = dataclasses.replace(plan, policy=Policy(row_shape="uniform"))
    with pytest.raises(PlanError, match="invariant 5"):
        check_plan(uniform, LENGTHS)


def test_drop_must_be_allowed_and_trailing() -> None:
    plan = build_dp_schedule(
        [4] * 5, layout=Layout(dp=2), max_tokens_per_gpu=4, policy=Policy(unreachable="drop")
    )
    assert plan.steps[0].dropped_rollouts == (4,)
    check_plan(plan, [4] * 5)
    with pytest.raises(PlanError, match="invariant 3"):
        check_plan(dataclasses.replace(plan, policy=Policy()), [4] * 5)


def test_check_needs_the_planned_lengths(plan: Plan) -> None:
    with pytest.raises(PlanError, match="12 samples"):
        check_plan(plan, LENGTHS[:-1])
    with pytest.raises(PlanError, match="invariant 4"):
        check_plan(plan, [n + 1 for n in LENGTHS])


@pytest.mark.parametrize("budget", [None, 2**50])
def test_a_missing_or_huge_budget_breaks_a_plan(plan: Plan, budget: int | None) -> None:
    with pytest.raises(PlanError, match=r"invariant 4 is broken: .*max_tokens_per_gpu"):
        check_plan(dataclasses.replace(plan, max_tokens_per_gpu=budget), LENGTHS)
