"""Families are cut into parts that fit, and plans with prefixes use them."""

from __future__ import annotations

import numpy as np
import pytest

from megapack import (
    CostModel,
    Layout,
    Plan,
    PlanError,
    Policy,
    SharedPrefixes,
    build_dp_schedule,
    check_plan,
    simulate,
)
from megapack.base.arrays import Ints
from megapack.planner.families import Families, cut_families
from megapack.planner.items import Items
from megapack.planner.step import Step
from megapack.prefixes import PrefixTable

pytestmark = pytest.mark.unit


def groups(num_groups: int, size: int, prompt: int, answer: int) -> tuple[Ints, SharedPrefixes]:
    """Lengths and prefixes of groups of equal samples."""
    ids = np.repeat(np.arange(num_groups), size).tolist()
    prefixes = SharedPrefixes.from_groups(ids, [prompt] * len(ids))
    return np.full(len(ids), prompt + answer), prefixes


def items(
    lengths: Ints,
    prefixes: SharedPrefixes,
    *,
    budget: int | None,
    layout: Layout | None = None,
    policy: Policy | None = None,
    max_samples: int | None = None,
) -> Items:
    layout = layout or Layout()
    step = Step(
        number=0,
        lengths=lengths,
        layout=layout,
        policy=policy or Policy(),
        cost=CostModel(per_token=1.0),
        budget=budget,
        max_samples=max_samples,
        prefixes=PrefixTable(prefixes, lengths, layout),
    )
    samples = np.arange(lengths.size)
    return Items.whole(step, samples, samples)


def cut(whole: Items, most_work: float = np.inf) -> Items:
    return cut_families(whole, Families.find(whole), most_work)


def parts_of(packed: Items) -> list[list[int]]:
    """The samples of each item."""
    return [part.tolist() for part in np.split(packed.samples, packed.first_samples[1:])]


def test_a_family_that_fits_is_one_part_as_large_as_its_tokens() -> None:
    lengths, prefixes = groups(2, 4, prompt=101, answer=50)
    parts = cut(items(lengths, prefixes, budget=1000))
    assert parts_of(parts) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    # 100 positions of the prompt once; each sample has the last one and 50 of its answer.
    assert parts.aligned.tolist() == [304, 304]
    assert parts.aligned_sq.tolist() == [4 * 151**2 - 3 * 100**2] * 2
    assert parts.shared.tolist() == [300, 300]
    assert parts.lengths.tolist() == [604, 604]


def test_a_family_over_the_budget_becomes_few_and_even_parts() -> None:
    lengths, prefixes = groups(1, 10, prompt=101, answer=50)
    # 6 samples fit, 100 + 6 * 51 = 406; so 2 parts are needed, and these have 5 each.
    parts = cut(items(lengths, prefixes, budget=420))
    assert parts_of(parts) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert parts.aligned.tolist() == [355, 355]
    work = cut(items(lengths, prefixes, budget=1000), most_work=420.0)
    assert parts_of(work) == parts_of(parts)


def test_a_forest_is_cut_between_its_groups_first() -> None:
    # Two groups of 4 under a common beginning of 60 tokens: 59 + 2 * (241 + 4 * 51).
    common = (0, 301, 301, 301, 60, 301, 301, 301)
    lengths = np.full(8, 351)
    prefixes = SharedPrefixes(tuple(range(8)), common)
    assert parts_of(cut(items(lengths, prefixes, budget=949))) == [list(range(8))]
    assert parts_of(cut(items(lengths, prefixes, budget=948))) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert parts_of(cut(items(lengths, prefixes, budget=503))) == [
        [0, 1],
        [2, 3],
        [4, 5],
        [6, 7],
    ]


def shared(common: Ints, first: int, second: int) -> int:
    return max(int(common[first + 1 : second + 1].min()) - 1, 0)


COST = CostModel(fixed=50.0, per_token=1.0, per_token_sq=1e-3)


def pair(lengths: Ints, prefixes: SharedPrefixes, **options: object) -> tuple[Plan, Plan]:
    """The plans with and without prefixes."""
    plans = [
        build_dp_schedule(lengths, cost=COST, prefixes=given, **options)  # type: ignore[arg-type]
        for given in (prefixes, None)
    ]
    for plan in plans:
        check_plan(plan, lengths)
    return plans[0], plans[1]


def seconds(plan: Plan) -> float:
    (step,) = plan.steps
    lockstep = plan.layout.ep_spans_dp
    return simulate(
        step, layout=plan.layout, cost=COST, lockstep=lockstep, forward_only=plan.forward_only
    ).makespan


@pytest.mark.parametrize(
    "options",
    [
        {"layout": Layout(dp=4)},
        {"layout": Layout(dp=2, pp=2)},
        {"layout": Layout(dp=2, pp=2, vpp=2), "policy": Policy(count_rule="multiple")},
        {"layout": Layout(dp=2, pp=2), "policy": Policy(row_shape="uniform")},
        {"layout": Layout(dp=2, pp=2), "policy": Policy(unreachable="drop")},
        {"layout": Layout(dp=2, pp=2), "policy": Policy(max_live_tokens_per_gpu=9000)},
        {"layout": Layout(dp=2, pp=2), "policy": Policy(search=0)},
        {"layout": Layout(dp=2, pp=2, cp=2), "forward_only": True},
        {"layout": Layout(dp=4, pp=2, ep=4)},
        {"layout": Layout(dp=2, pp=2), "max_tokens_per_gpu": None, "micro_batch_size": 8},
    ],
    ids=str,
)
def test_long_prompts_make_steps_shorter_under_every_policy(options: dict[str, object]) -> None:
    lengths, prefixes = groups(12, 8, prompt=1000, answer=200)
    with_, without = pair(lengths, prefixes, **{"max_tokens_per_gpu": 4096, **options})
    assert with_.prefixes is not None
    assert with_.counts.num_samples == 96
    assert seconds(with_) < 0.7 * seconds(without)


def test_fewer_families_than_micro_batches_are_cut() -> None:
    lengths, prefixes = groups(1, 16, prompt=400, answer=300)
    plan, without = pair(
        lengths, prefixes, layout=Layout(dp=2, pp=2, vpp=2), max_tokens_per_gpu=16384
    )
    assert plan.counts.num_padding_rows == 0
    assert plan.prefixes == prefixes
    assert seconds(plan) < seconds(without)


def test_colocated_sets_that_fit_because_they_share_are_not_oversize() -> None:
    lengths, prefixes = groups(4, 2, prompt=500, answer=100)
    sets = np.repeat(np.arange(4), 2).tolist()
    options: dict[str, object] = {
        "layout": Layout(dp=2),
        "max_tokens_per_gpu": 800,
        "colocate_ids": sets,
        "policy": Policy(oversize="error"),
    }
    plan = build_dp_schedule(lengths, prefixes=prefixes, **options)  # type: ignore[arg-type]
    check_plan(plan, lengths)
    # 499 positions once, and 101 of each sample.
    assert {mb.padded_tokens for mb in plan.steps[0].microbatches} == {701}
    with pytest.raises(PlanError, match="1200 tokens, 1200 padded"):
        build_dp_schedule(lengths, **options)  # type: ignore[arg-type]
    tight = options | {"max_tokens_per_gpu": 700}
    with pytest.raises(PlanError, match="1200 tokens, 701 padded"):
        build_dp_schedule(lengths, prefixes=prefixes, **tight)  # type: ignore[arg-type]


def test_prefixes_that_save_nothing_leave_the_plan_as_it_was() -> None:
    lengths, prefixes = groups(8, 8, prompt=4, answer=900)
    plan, without = pair(lengths, prefixes, layout=Layout(dp=2, pp=2), max_tokens_per_gpu=4096)
    assert plan == without
    off = Policy(share_prefixes="off")
    lengths, prefixes = groups(8, 8, prompt=400, answer=900)
    plan, without = pair(
        lengths, prefixes, layout=Layout(dp=2), max_tokens_per_gpu=4096, policy=off
    )
    assert plan == without
