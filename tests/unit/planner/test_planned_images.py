"""The images of a plan: who encodes them, and what that takes in the simulator."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from megapack import CostModel, ImageRef, Layout, Plan, Policy, build_dp_schedule, simulate
from megapack.errors import ConfigError, DataError, PlanError
from megapack.images import Images
from megapack.outlook.baselines import naive_plans
from megapack.outlook.stats import image_load, plan_report
from megapack.plan.check import check_plan
from megapack.plan.show import format_grid
from megapack.planner.images import spread

pytestmark = pytest.mark.unit

LAYOUT = Layout(dp=2, pp=2, tp=2)
COST = CostModel(per_token=1e-3, per_token_sq=1e-7, per_patch=1e-3, per_patch_sq=1e-7)


def image(number: int, side: int = 16) -> ImageRef:
    return ImageRef(offset=1, grid=(1, side, side), key=f"image {number}")


# Groups of 4 that share an image, and samples of text between them.
LENGTHS = [200 + 17 * i for i in range(32)]
IMAGES: list[Images] = [(image(i // 8, 8 + 8 * (i // 8)),) if i % 2 else () for i in range(32)]


def planned(layout: Layout = LAYOUT, **options: Any) -> Plan:
    given: dict[str, Any] = {"max_tokens_per_gpu": 2048, "cost": COST, "images": IMAGES}
    return build_dp_schedule(LENGTHS, layout=layout, **given | options)


def test_each_image_of_a_step_has_one_gpu() -> None:
    plan = planned(num_steps=2)
    check_plan(plan, LENGTHS, IMAGES)
    keys = [[one.key for one in step.images] for step in plan.steps]
    assert all(len(set(own)) == len(own) for own in keys)
    assert {*keys[0], *keys[1]} == {f"image {n}" for n in range(4)}
    uses = Counter(i for step in plan.steps for one in step.images for i in one.samples)
    assert uses == dict.fromkeys(range(1, 32, 2), 1)
    assert plan.counts.num_image_uses == 16
    assert plan.counts.image_tokens == sum(ref.tokens for refs in IMAGES for ref in refs)
    # Fewer images than GPUs: each is on one of the DP ranks that read it.
    for step in plan.steps:
        assert len({one.owner for one in step.images}) == len(step.images)
        for number, one in enumerate(step.images):
            assert one.owner is not None
            assert number in step.rank_images[one.owner // 4]


def test_images_are_part_of_the_digest_and_come_back() -> None:
    plan, without = planned(), planned(images=None)
    assert plan.digest() != without.digest()
    assert planned(images=[()] * 32).digest() == without.digest()
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert "images: 4 of 16 are encoded, 1920 patches" in format_grid(plan)
    assert 'image ["image 3", 1024, 256, ' in str(plan)
    # Rows do not depend on them.
    assert [step.ranks for step in plan.steps] == [step.ranks for step in without.steps]


def test_grids_may_be_numpys() -> None:
    rows, columns = np.array([16, 8])
    images = [(ImageRef(offset=1, grid=(1, rows, columns), key="a"),)] * 2
    plan = build_dp_schedule([100, 90], layout=LAYOUT, max_tokens_per_gpu=256, images=images)
    assert Plan.from_json(plan.to_json()) == plan
    check_plan(plan, [100, 90], images)


def edited(plan: Plan, **changes: Any) -> Plan:
    (step,) = plan.steps
    first, *others = step.images
    images = (first._replace(**changes), *others)
    return dataclasses.replace(plan, steps=(dataclasses.replace(step, images=images),))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda plan: edited(plan, owner=8), "encoded by GPU 8 of 8"),
        (lambda plan: edited(plan, owner=None), "encoded by GPU None of 8"),
        (lambda plan: edited(plan, samples=(32,)), "not all of the step"),
        (lambda plan: edited(plan, samples=(1, 3)), "or others"),
        (lambda plan: edited(plan, patches=8), "or others"),
        (lambda plan: edited(plan, key="image 1"), "or others"),
        (lambda plan: planned(images=None), "0 images, its samples 4"),
    ],
)
def test_other_images_are_refused(wrong: Callable[[Plan], Plan], message: str) -> None:
    with pytest.raises(PlanError, match=f"invariant 13 is broken: .*{message}"):
        check_plan(wrong(planned()), LENGTHS, IMAGES)


def test_damaged_images_are_refused() -> None:
    text = planned().to_json()
    for before, after in (
        ('["image 0",64,16,', '["image 0",64,'),
        ('["image 0",64,16,', "[0,64,16,"),
        ('["image 0",64,16,', '["image 0",-64,16,'),
    ):
        assert before in text
        with pytest.raises(PlanError, match="images must be a list of"):
            Plan.from_json(text.replace(before, after))
    with pytest.raises(PlanError, match="has an image twice"):
        check_plan(edited(planned(), key="image 1"), LENGTHS)
    with pytest.raises(DataError, match="a list per sample"):
        planned(images=IMAGES[:3])


def test_images_are_spread_evenly() -> None:
    sizes = [4 * (1 + k % 7) ** 2 for k in range(64)]
    owners = spread(np.array(sizes), 4, [[]] * 64)
    loads = [sum(n for n, owner in zip(sizes, owners, strict=True) if owner == r) for r in range(4)]
    assert max(loads) < 1.05 * sum(loads) / 4
    assert spread(np.array([]), 4, []) == []
    # Of GPUs with as little to do, one that reads it.
    assert spread(np.array([8.0, 4]), 4, [[2, 3], [2, 1]]) == [2, 1]
    # GPUs without images before a second one for any.
    assert sorted(spread(np.array([8] * 4), 4, [[2]] * 4)) == [0, 1, 2, 3]


def test_phases_come_before_and_after_the_rows() -> None:
    cost = dataclasses.replace(COST, per_image_token=1e-4)
    plan = planned(cost=cost)
    (step,) = plan.steps
    run = simulate(step, layout=LAYOUT, cost=cost)
    rows = simulate(dataclasses.replace(step, images=()), layout=LAYOUT, cost=cost)
    # Each of four images is alone on its GPU; the largest has 32 x 32 patches.
    largest = 1e-3 * 1024 + 1e-7 * 1024**2
    tokens = max(sum(step.images[n].tokens for n in own) for own in step.rank_images)
    expected = largest + 1e-4 * tokens + 2 * largest + 2e-4 * tokens
    assert run.image_seconds == pytest.approx(expected)
    assert run.makespan == pytest.approx(rows.makespan + expected)
    assert run.bubble_fraction == pytest.approx(rows.bubble_fraction)
    kinds = Counter(event.kind for event in run.events)
    lanes = {(one.owner // 4, one.owner % 4 // 2) for one in step.images if one.owner is not None}
    assert kinds["E"] == kinds["T"] == len(lanes)
    assert min(event.start for event in run.events if event.kind == "F") == pytest.approx(
        largest + 1e-4 * tokens
    )
    ends = {kind: max(e.end for e in run.events if e.kind == kind) for kind in "BT"}
    assert ends["T"] == run.makespan > ends["B"]
    frozen = dataclasses.replace(cost, tower_ratio=0.0)
    assert simulate(step, layout=LAYOUT, cost=frozen).image_seconds == pytest.approx(
        largest + 1e-4 * tokens
    )
    forward = simulate(step, layout=LAYOUT, cost=cost, forward_only=True)
    assert forward.image_seconds == pytest.approx(largest + 1e-4 * tokens)


def test_rows_that_encode_images_take_longer_on_the_first_chunk() -> None:
    plan = planned(policy=Policy(images="row"))
    check_plan(plan, LENGTHS, IMAGES)
    (step,) = plan.steps
    assert {one.owner for one in step.images} == {None}
    run = simulate(step, layout=LAYOUT, cost=COST)
    bare = simulate(dataclasses.replace(step, images=()), layout=LAYOUT, cost=COST)
    assert run.image_seconds == 0.0

    def busy(run: Any, stage: int) -> float:
        return sum(event.end - event.start for event in run.events if event.stage == stage)

    patches = [one.patches for one in step.images for _ in one.samples]
    seconds = 3 * sum(1e-3 * n + 1e-7 * n * n for n in patches)
    assert busy(run, 0) == pytest.approx(busy(bare, 0) + seconds)
    assert busy(run, 1) == pytest.approx(busy(bare, 1))
    assert "16 are encoded in rows" in format_grid(plan)


def test_gpus_are_counted_by_dp_rank_and_then_by_stage() -> None:
    # GPUs 2 and 3 are stage 1 of DP rank 0.
    images = [(image(0),), *[()] * 31]
    (step,) = edited(planned(images=images), owner=2).steps
    events = simulate(step, layout=LAYOUT, cost=COST).events
    assert [(e.kind, e.rank, e.stage) for e in events if e.microbatch < 0] == [
        ("E", 0, 1),
        ("T", 0, 1),
    ]


def test_other_packings_encode_images_in_rows() -> None:
    for plan in naive_plans(planned(), np.array(LENGTHS)).values():
        assert {one.owner for step in plan.steps for one in step.images} == {None}
        assert plan.policy.images == "row"


def test_the_work_of_rows_that_encode_images() -> None:
    layout = Layout(dp=2, pp=2)
    (step,) = planned(layout, policy=Policy(images="row")).steps
    bare = dataclasses.replace(step, images=())
    frozen = dataclasses.replace(COST, tower_ratio=0.0)

    def first_stage(one: Any, **options: Any) -> list[float]:
        events = simulate(one, layout=layout, **{"cost": COST, **options}).events
        return [
            sum(e.end - e.start for e in events if (e.rank, e.stage) == (rank, 0))
            for rank in range(2)
        ]

    def images_of(rank: int, number: int) -> float:
        numbers = [n for i in step.ranks[rank][number].samples for n in step.images_of.get(i, ())]
        return float(COST.image_seconds([step.images[n].patches for n in numbers]).sum())

    count = range(step.num_microbatches)
    own = [sum(images_of(rank, k) for k in count) for rank in range(2)]
    added = np.subtract(first_stage(step, cost=frozen), first_stage(bare))
    assert added == pytest.approx(own)
    # In lockstep each micro-batch takes as long as on the slowest rank.
    slowest = 3 * sum(max(images_of(0, k), images_of(1, k)) for k in count)
    added = np.subtract(first_stage(step, lockstep=True), first_stage(bare, lockstep=True))
    assert added == pytest.approx([slowest] * 2)
    run = simulate(step, layout=layout, cost=COST)
    assert run.busy_seconds == pytest.approx(first_stage(step)[run.slowest_rank])


def test_equal_work_has_a_tower_s_backward() -> None:
    plan = planned()

    def equal_work(cost: CostModel) -> float:
        return plan_report(plan, LENGTHS, cost).equal_work_seconds or 0.0

    trained, frozen, bare = (
        equal_work(dataclasses.replace(COST, **changes))
        for changes in ({}, {"tower_ratio": 0.0}, {"per_patch": 0.0, "per_patch_sq": 0.0})
    )
    assert trained - bare == pytest.approx(3 * (frozen - bare))
    assert frozen > bare


def test_rows_are_balanced_with_their_images() -> None:
    layout = Layout(dp=4)
    lengths = [1024] * 32
    images = [(image(i, 32),) if i % 4 == 0 else () for i in range(32)]
    options: dict[str, Any] = {"layout": layout, "max_tokens_per_gpu": 4096, "cost": COST}
    inside = {"images": images, "policy": Policy(images="row")}
    (aware,) = build_dp_schedule(lengths, **options, **inside).steps
    (blind,) = build_dp_schedule(lengths, **options).steps
    blind = dataclasses.replace(blind, images=aware.images)
    seconds = [simulate(one, layout=layout, cost=COST).makespan for one in (aware, blind)]
    assert seconds[0] < 0.9 * seconds[1]
    ranks = [[i for mb in rank for i in mb.samples if i % 4 == 0] for rank in aware.ranks]
    assert [len(rank) for rank in ranks] == [2, 2, 2, 2]


@pytest.mark.parametrize(
    "setting", [{"context_parallel": "dynamic"}, {"split_samples": "auto"}, {"backward": "split"}]
)
def test_images_in_rows_are_in_plain_rows(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"images='row' with .*; set .*images='ahead'"):
        planned(policy=Policy(images="row", **setting))


def test_rows_are_within_a_budget_of_patches() -> None:
    images = [(image(i, 32),) if i % 2 else () for i in range(32)]
    lengths = [300 + 17 * i for i in range(32)]
    options: dict[str, Any] = {"layout": Layout(dp=2), "images": images, "cost": COST}
    most, plans = [], []
    for policy in (Policy(images="row"), Policy(images="row", max_patches_per_gpu=2048)):
        plan = build_dp_schedule(lengths, max_tokens_per_gpu=8192, policy=policy, **options)
        check_plan(plan, lengths, images)
        assert Plan.from_json(plan.to_json()) == plan
        (step,) = plan.steps
        most.append(max(1024 * len(step.images_in(mb)) for mb in step.microbatches))
        plans.append(plan)
    assert most[1] == 2048 < most[0]
    wrong = dataclasses.replace(plans[0], policy=plans[1].policy)
    with pytest.raises(PlanError, match=r"a row of \d+ patches, max_patches_per_gpu=2048"):
        check_plan(wrong, lengths, images)
    # An image over the budget is alone.
    policy = Policy(images="row", max_patches_per_gpu=512)
    plan = build_dp_schedule(lengths, max_tokens_per_gpu=8192, policy=policy, **options)
    check_plan(plan, lengths, images)
    (step,) = plan.steps
    assert {len(mb.samples) for mb in step.microbatches if step.images_in(mb)} == {1}


@pytest.mark.parametrize(
    ("policy", "budget"),
    [
        (Policy(max_patches_per_gpu=512), {"max_tokens_per_gpu": 2048}),
        (Policy(images="row", max_patches_per_gpu=512), {"micro_batch_size": 2}),
    ],
)
def test_a_budget_of_patches_is_beside_one_of_tokens(
    policy: Policy, budget: dict[str, int]
) -> None:
    with pytest.raises(ConfigError, match="set max_patches_per_gpu=None, or images='row'"):
        build_dp_schedule(LENGTHS, layout=LAYOUT, images=IMAGES, policy=policy, **budget)


def test_explain_compares_with_images_in_rows() -> None:
    text = str(planned().explain())
    assert "images=ahead saves" in text
    assert "images" not in str(planned(images=None).explain())


def test_ahead_is_near_equal_work_where_rows_are_not() -> None:
    """A pipeline whose first stage encodes waits for it; VISION's first table, in small."""
    layout = Layout(dp=2, pp=4)
    images = [(image(i, 32),) if i % 2 else () for i in range(64)]
    lengths = [600 + 13 * (i % 9) for i in range(64)]
    options: dict[str, Any] = {"layout": layout, "max_tokens_per_gpu": 2048, "images": images}
    times = {}
    for where in ("ahead", "row"):
        plan = build_dp_schedule(lengths, **options, cost=COST, policy=Policy(images=where))
        times[where] = plan_report(plan, lengths, COST).time_over_equal_work
    assert times["ahead"] is not None
    assert times["row"] is not None
    assert times["ahead"] < 0.75 * times["row"]


def test_the_load_of_the_fullest_gpu() -> None:
    plan = planned()
    load = image_load(plan)
    assert load.patches == load.largest == 1024
    assert load.tokens == max(
        sum(step.images[n].tokens for n in own) for step in plan.steps for own in step.rank_images
    )
