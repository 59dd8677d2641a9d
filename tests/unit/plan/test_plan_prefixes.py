"""Plans whose rows share tokens: both forms, invariant 8, and how two of them differ."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from megapack import (
    Layout,
    MicroBatch,
    Plan,
    PlanError,
    Policy,
    SharedPrefixes,
    build_dp_schedule,
    check_plan,
)
from megapack.plan.show import diff_plans, format_grid

pytestmark = pytest.mark.unit

LENGTHS = [50, 60, 55, 70, 20, 90]
PREFIXES = SharedPrefixes((0, 1, 2, 3, 5), (0, 41, 41, 0, 31))


def planned(prefixes: SharedPrefixes | None = PREFIXES) -> Plan:
    layout = Layout(dp=2)
    return build_dp_schedule(LENGTHS, layout=layout, max_tokens_per_gpu=160, prefixes=prefixes)


@pytest.fixture
def plan() -> Plan:
    return planned()


def first_shared(plan: Plan, **changes: object) -> Plan:
    """The plan with fields of its first row that shares changed."""
    step = plan.steps[0]

    def edited(mb: MicroBatch) -> MicroBatch:
        return dataclasses.replace(mb, **changes) if mb is row else mb

    row = next(mb for mb in step.microbatches if mb.shared_tokens)
    ranks = tuple(tuple(edited(mb) for mb in rank) for rank in step.ranks)
    return dataclasses.replace(plan, steps=(dataclasses.replace(step, ranks=ranks),))


def test_json_with_prefixes_is_exact(plan: Plan) -> None:
    check_plan(plan, LENGTHS)
    assert plan.prefixes == PREFIXES
    assert plan.counts.shared_tokens == 40 + 40 + 30
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_json(plan.to_json()).digest() == plan.digest()
    assert plan.digest() != planned(None).digest()


@pytest.mark.parametrize("damage", [{"common": None}, {"common": [0, 1.5]}, {"more": 1}])
def test_damaged_prefixes_are_refused(plan: Plan, damage: dict[str, Any]) -> None:
    payload = json.loads(plan.to_json())
    payload["prefixes"] |= damage
    with pytest.raises(PlanError, match="prefixes") as caught:
        Plan.from_json(json.dumps(payload))
    assert len(str(caught.value).splitlines()) == 1


def test_each_break_of_the_prefix_invariant_is_named(plan: Plan) -> None:
    row = next(mb for mb in plan.steps[0].microbatches if mb.shared_tokens)
    shared = row.shared_tokens
    off = dataclasses.replace(plan.policy, share_prefixes="off")
    longer = SharedPrefixes(PREFIXES.order, (0, 51, 51, 0, 31))
    broken = {
        rf"shared_tokens {shared + 1}, not {shared}": first_shared(plan, shared_tokens=shared + 1),
        rf"shared_tokens {shared}, not 0": dataclasses.replace(plan, prefixes=None),
        r"under share_prefixes='off'": dataclasses.replace(plan, policy=off),
        r"sample 1 of 60 tokens has 51 .* at most 50": dataclasses.replace(plan, prefixes=longer),
        r"numbered 0 to 6 for a batch of 6": dataclasses.replace(
            plan, prefixes=SharedPrefixes((0, 6), (0, 31))
        ),
    }
    for what, edited in broken.items():
        with pytest.raises(PlanError, match=f"invariant 8 is broken: .*{what}"):
            check_plan(edited, LENGTHS)
    with pytest.raises(PlanError, match="invariant 4"):
        check_plan(first_shared(plan, tokens_sq=row.tokens_sq + 1), LENGTHS)


def test_the_budget_counts_what_a_row_holds(plan: Plan) -> None:
    longest = max(mb.padded_tokens for mb in plan.steps[0].microbatches)
    strict = dataclasses.replace(plan, policy=Policy(oversize="error"))
    check_plan(dataclasses.replace(strict, max_tokens_per_gpu=longest), LENGTHS)
    with pytest.raises(PlanError, match=rf"holds {longest} padded .* budget is {longest - 1} "):
        check_plan(dataclasses.replace(strict, max_tokens_per_gpu=longest - 1), LENGTHS)


def test_other_prefixes_are_a_difference(plan: Plan) -> None:
    other = planned(None)
    assert diff_plans(plan, plan) == []
    assert any(line.startswith('prefixes: {"order":[') for line in diff_plans(plan, other))
    off = dataclasses.replace(other, policy=Policy(share_prefixes="off"))
    assert diff_plans(other, off) == ['policy.share_prefixes: null -> "off"']


def test_the_grid_says_what_rows_share(plan: Plan) -> None:
    assert " 235 row tokens; shared prefixes: 110 of 345 tokens (31.9%)" in format_grid(plan)
    rank = next(k for k, rank in enumerate(plan.steps[0].ranks) if rank[0].shared_tokens == 80)
    assert "; 80 tokens shared" in format_grid(plan, 0, rank)
    assert "shared" not in format_grid(planned(None))
