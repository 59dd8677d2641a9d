"""Families in pieces: which are cut, what that gains, and that no plan is slower for it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from megapack import CostModel, Layout, Plan, Policy, SharedPrefixes, build_dp_schedule, check_plan
from megapack.pipeline.simulator import simulate_planned
from megapack.planner.families import Families

pytestmark = pytest.mark.unit

COST = CostModel(fixed=100.0, per_token=1.0, per_token_sq=1 / 49152)
WHOLE = Policy(search=100)
PIECES = Policy(split_samples="auto", search=100)
BOTH = Policy(split_samples="auto", backward="split", search=100)
BUDGET = 9000


class Trace:
    """Groups of samples with one prompt, and samples without a group."""

    def __init__(
        self, prompts: list[int], responses: tuple[int, int], size: int, seed: int = 0
    ) -> None:
        rng = np.random.default_rng(seed)
        sizes = [int(n) for n in rng.integers(*responses, size=len(prompts) * size)]
        self.prompts = [prompt for prompt in prompts for _ in range(size)]
        self.lengths = [p + n for p, n in zip(self.prompts, sizes, strict=True)]
        self.group_ids = [k // size for k in range(len(self.prompts))]

    def with_singles(self, count: int, seed: int = 1) -> Trace:
        singles = np.random.default_rng(seed).lognormal(6, 0.8, count).clip(10, 5000)
        self.lengths += singles.astype(int).tolist()
        self.prompts += [1] * count
        self.group_ids += range(1000, 1000 + count)
        return self

    def plan(self, layout: Layout, policy: Policy, **arguments: Any) -> Plan:
        arguments = {"max_tokens_per_gpu": BUDGET, "cost": COST, **arguments}
        prefixes = SharedPrefixes.from_groups(self.group_ids, self.prompts)
        plan = build_dp_schedule(
            self.lengths, layout=layout, policy=policy, prefixes=prefixes, **arguments
        )
        check_plan(plan, self.lengths)
        return plan


def seconds(plan: Plan) -> float:
    return sum(simulate_planned(plan, step, COST).makespan for step in plan.steps)


def cut_families(plan: Plan) -> int:
    """Rows with the first pieces of several samples."""
    rows = [mb for step in plan.steps for mb in step.microbatches if len(mb.pieces) > 1]
    return sum(mb.pieces[0].begin == 0 for mb in rows)


LARGE = Trace([7500] * 4, (500, 1400), 12)


@pytest.mark.parametrize(
    ("layout", "arguments", "ratio"),
    [
        (Layout(dp=1, pp=4), {}, 0.6),
        (Layout(dp=2, pp=4), {}, 0.8),
        (Layout(dp=2, pp=4, vpp=2), {}, 0.6),
        # No stage waits for a backward, and a pass holds one micro-batch.
        (Layout(dp=2), {"forward_only": True}, 0.4),
        (Layout(dp=2, pp=4), {"forward_only": True}, 0.6),
    ],
)
def test_families_over_the_budget_hold_their_prompt_in_fewer_rows(
    layout: Layout, arguments: dict[str, Any], ratio: float
) -> None:
    whole = LARGE.plan(layout, WHOLE, **arguments)
    plan = LARGE.plan(layout, PIECES, **arguments)
    assert cut_families(plan) >= 4
    assert plan.counts.num_split_samples == len(LARGE.lengths)
    assert plan.counts.shared_tokens > whole.counts.shared_tokens
    assert seconds(plan) < ratio * seconds(whole)
    assert seconds(LARGE.plan(layout, BOTH, **arguments)) <= seconds(plan) * (1 + 1e-9)


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(dp=2, pp=2, cp=2)])
def test_a_cap_that_holds_long_chains_gains_most(layout: Layout) -> None:
    budget = BUDGET // layout.cp
    plan = LARGE.plan(layout, PIECES, max_tokens_per_gpu=budget)
    # With pp=1 a stage has room for one row.
    assert (cut_families(plan) > 0) == (layout.pp > 1)
    roomy = dataclasses.replace(PIECES, max_live_tokens_per_gpu=6 * budget)
    cut = LARGE.plan(layout, roomy, max_tokens_per_gpu=budget)
    assert cut_families(cut) > 0
    assert seconds(cut) < 0.8 * seconds(plan)


def test_colocated_pairs_are_cut_together() -> None:
    pairs = [k // 2 for k in range(len(LARGE.lengths))]
    # A row holds a pair or two.
    layout = Layout(dp=1, pp=4)
    plan = LARGE.plan(layout, PIECES, colocate_ids=pairs, max_tokens_per_gpu=10_500)
    assert cut_families(plan) > 0


@pytest.mark.parametrize(
    ("layout", "seed"),
    [
        (Layout(dp=2, pp=4), 0),
        (Layout(dp=2, pp=2, vpp=2), 1),
        (Layout(dp=2, tp=2, cp=2, pp=2), 2),
    ],
)
def test_no_plan_is_slower_than_without_pieces(layout: Layout, seed: int) -> None:
    rng = np.random.default_rng(seed)
    prompts = rng.integers(500, 8000, size=int(rng.integers(1, 6))).tolist()
    trace = Trace(prompts, (10, 950), int(rng.integers(2, 14)), seed).with_singles(40 * seed)
    budget = {"max_tokens_per_gpu": BUDGET // layout.cp}
    for policy in (PIECES, BOTH):
        plan = trace.plan(layout, policy, **budget)
        whole = trace.plan(layout, dataclasses.replace(policy, split_samples="off"), **budget)
        assert seconds(plan) <= seconds(whole) * (1 + 1e-9)
        assert plan == trace.plan(layout, policy, **budget)


def families(order: list[int], link: list[int]) -> list[tuple[list[int], int]]:
    found = Families(np.array(order), np.array(link)).worth_a_row()
    return [(members.tolist(), depth) for members, depth in found]


def test_the_prefixes_that_save_most_get_a_row() -> None:
    # Two families of three items, and one of two.
    assert families([4, 5, 6, 0, 1], [0, 30, 30, 0, 9]) == [([4, 5, 6], 30), ([0, 1], 9)]
    # A system prompt of 5 before prompts of 50 saves 5 * 5; the prompts save 2 * (2 * 50).
    system = [0, 50, 50, 5, 50, 50]
    assert families([*range(6)], system) == [([0, 1, 2], 50), ([3, 4, 5], 50)]
    # With 45 before prompts of 50 it saves 5 * 45.
    assert families([*range(6)], [0, 50, 50, 45, 50, 50]) == [([*range(6)], 45)]
    # A trunk of 20 that branches at 21, 22 and 23: four share 20.
    assert families([*range(4)], [0, 20, 22, 23]) == [([0, 1, 2, 3], 20)]
    assert families([], []) == []


@pytest.mark.parametrize("forward_only", [False, True])
def test_a_family_whose_samples_are_over_the_budget_is_cut_as_one(*, forward_only: bool) -> None:
    over = Trace([7500] * 3, (1600, 3000), 8)
    plan = over.plan(Layout(dp=1, pp=4), PIECES, forward_only=forward_only)
    assert cut_families(plan) >= 3
    assert plan.counts.num_split_samples == len(over.lengths)
    alone = over.plan(
        Layout(dp=1, pp=4),
        dataclasses.replace(PIECES, share_prefixes="off"),
        forward_only=forward_only,
    )
    assert seconds(plan) < 0.7 * seconds(alone)
