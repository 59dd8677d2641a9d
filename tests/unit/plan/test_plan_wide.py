"""Plans whose micro-batches lie over several DP ranks: their forms and invariants."""

from __future__ import annotations

import dataclasses

import pytest

from megapack.errors import PlanError
from megapack.layout import Layout
from megapack.plan import MicroBatch, Plan, StepPlan, check_plan
from megapack.policy import ContextParallel, Policy
from tests.made_rows import made_row

LENGTHS = [100, 10, 20, 30]


def row(*samples: int, width: int = 1, first: int = 0) -> MicroBatch:
    # Not `block_ranks`: a case has a block that is not aligned.
    ranks = tuple(range(first, first + width)) if width > 1 else ()
    return made_row(samples, LENGTHS, Layout(dp=4), ranks)


def plan(
    *ranks: tuple[MicroBatch, ...], policy: ContextParallel = "dynamic", budget: int = 60
) -> Plan:
    step = StepPlan(ranks, len(ranks[0]), None, (0, 1, 2, 3), ())
    return Plan(
        steps=(step,),
        layout=Layout(dp=4),
        policy=Policy(context_parallel=policy),
        max_tokens_per_gpu=budget,
        micro_batch_size=None,
        num_samples=4,
        rollout_ids=None,
    )


WIDE = row(0, width=2)
GOOD = (
    (WIDE, row()),
    (WIDE, row(1)),
    (row(2), row()),
    (row(3), row()),
)


def test_a_wide_row_is_legal_and_counted_once() -> None:
    good = plan(*GOOD)
    check_plan(good, LENGTHS)
    counts = good.counts
    assert (counts.num_rows, counts.num_samples, counts.tokens) == (4, 4, 160)
    assert (counts.num_wide_rows, counts.wide_tokens, counts.widest) == (1, 100, 2)
    assert good.steps[0].kept_samples == (0, 1, 2, 3)


def test_json_is_exact() -> None:
    good = plan(*GOOD)
    assert Plan.from_json(good.to_json()) == good
    assert "0:100:100:10000:100:0:2" in str(good)


BROKEN = {
    "another row": (r"rank 1 runs another", ((WIDE, row()), (row(1), WIDE), *GOOD[2:])),
    "no block": (
        r"no aligned block",
        (
            (row(2), row()),
            (row(0, width=2, first=1), row(1)),
            (row(0, width=2, first=1), row()),
            (row(3), row()),
        ),
    ),
    "three ranks": (
        r"no aligned block",
        tuple((dataclasses.replace(WIDE, dp_ranks=(0, 1, 2)), row()) for _ in range(4)),
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_sharers_are_one_block_at_one_place(name: str) -> None:
    message, ranks = BROKEN[name]
    with pytest.raises(PlanError, match=f"invariant 9 is broken.*{message}"):
        check_plan(plan(*ranks), LENGTHS)


def test_fixed_plans_share_no_row() -> None:
    with pytest.raises(PlanError, match=r"invariant 9 .* over 2 ranks, context_parallel='fixed'"):
        check_plan(plan(*GOOD, policy="fixed"), LENGTHS)


def test_the_budget_is_that_of_all_its_ranks() -> None:
    with pytest.raises(PlanError, match=r"invariant 4 .*the budget is 98 .*49 \* cp \* 2 ranks"):
        check_plan(plan(*GOOD, budget=49), LENGTHS)


def test_no_sample_is_alone_over_the_budget() -> None:
    alone = ((row(0),), (row(1),), (row(2),), (row(3),))
    check_plan(plan(*alone, policy="fixed"), LENGTHS)
    with pytest.raises(PlanError, match=r"invariant 4 .*holds 100 padded tokens"):
        check_plan(plan(*alone), LENGTHS)
