"""Samples in pieces whose rows lie over several DP ranks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from megapack import CostModel, Layout, Plan, Policy, build_dp_schedule, check_plan
from megapack.pipeline.simulator import simulate_planned
from megapack.planner.items import Items
from megapack.planner.search import best_draft
from megapack.planner.step import Step

pytestmark = pytest.mark.unit

COST = CostModel(fixed=200.0, per_token=1.0, per_token_sq=1 / 4096, cp_overhead=0.05)
EVERY = Policy(split_samples="auto", backward="split", context_parallel="dynamic", max_width=2)
# The first sample has more work than a rank of dp=8 should have.
HEAVY = [16000, *[2000] * 60]
LAYOUT = Layout(dp=8, pp=4)


def planned(policy: Policy, layout: Layout = LAYOUT) -> Plan:
    plan = build_dp_schedule(
        HEAVY, layout=layout, max_tokens_per_gpu=16384, cost=COST, policy=policy
    )
    check_plan(plan, HEAVY)
    return plan


def seconds(plan: Plan) -> float:
    return simulate_planned(plan, plan.steps[0], COST).makespan


def items_of(lengths: list[int], layout: Layout, policy: Policy = EVERY) -> Items:
    step = Step(
        number=0,
        lengths=np.array(lengths),
        layout=layout,
        policy=policy,
        cost=COST,
        budget=16384,
    )
    samples = np.arange(len(lengths))
    return Items.whole(step, samples, samples)


def test_a_sample_as_heavy_as_a_rank_is_cut_over_several() -> None:
    plan = planned(EVERY)
    (step,) = plan.steps
    wide = {part.sample for mb in step.microbatches if mb.width > 1 for part in mb.pieces}
    assert wide == {0}
    assert step.meeting_ranks(LAYOUT) == [
        range(2),
        *(range(rank, rank + 1) for rank in range(2, 8)),
    ]
    narrow = planned(dataclasses.replace(EVERY, context_parallel="fixed"))
    whole = planned(dataclasses.replace(EVERY, split_samples="off"))
    assert seconds(plan) < 0.7 * seconds(narrow)
    assert seconds(plan) < 0.7 * seconds(whole)
    assert planned(EVERY) == plan


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=8, pp=4),
        Layout(dp=6, pp=2),
        Layout(dp=4, pp=2, vpp=2, cp=2),
        Layout(dp=4, pp=2, ep=4),
    ],
)
def test_the_search_knows_what_the_simulator_finds(layout: Layout) -> None:
    draft = best_draft(items_of(HEAVY, layout))
    assert draft.board_seconds is not None
    simulated = dataclasses.replace(draft, board_seconds=None).seconds()
    assert draft.board_seconds == pytest.approx(simulated, rel=1e-9)
    planned(EVERY, layout)


def test_a_sample_over_the_budget_needs_fewer_rows_over_several_ranks() -> None:
    lengths = [60000, *[2000] * 8]
    plan = build_dp_schedule(
        lengths,
        layout=Layout(dp=4),
        max_tokens_per_gpu=8192,
        cost=COST,
        policy=dataclasses.replace(EVERY, max_width=4),
    )
    check_plan(plan, lengths)
    (step,) = plan.steps
    assert step.num_microbatches is not None
    assert step.num_microbatches < 60000 / 8192
    assert sum(len(mb.pieces) for mb in step.microbatches) > 1
