"""The cost model that a run's own seconds give, under a clock whose true model is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from megapack import CostModel, Layout, Plan, Policy, build_dp_schedule, simulate
from megapack.base.arrays import Floats
from megapack.cost.online import (
    KEEP,
    ChunkSeconds,
    fit_images,
    fit_sums,
    image_sums,
    row_sums,
    slowness,
)
from megapack.cost.slowness import SlowRanks
from tests.made_clock import MadeClock

pytestmark = pytest.mark.unit

LAYOUT = Layout(dp=2, pp=2)
BUDGET = 8192
TRUE = CostModel(
    fixed=3e-4,
    per_token=1e-6,
    per_token_sq=1.5e-10,
    backward_ratio=2.3,
    stage_weights=(0.8, 1.2),
    weight_ratio=0.7,
)
# Each constant is three times off, in different directions.
WRONG = CostModel(fixed=1e-4, per_token=3e-6, per_token_sq=0.5e-10, backward_ratio=0.8)
# The run of the main job's defaults: a fit every 5 steps.
INTERVAL = 5

Steps = list[Mapping[tuple[int, int], list[ChunkSeconds]]]


def drawn_lengths(step: int) -> np.ndarray:
    drawn = np.random.default_rng(step).lognormal(6.5, 1.0, 96)
    return np.clip(drawn, 16, BUDGET).astype(np.int64)


class Run:
    """A run on one process: plans by the model in force, steps by the clock, fits."""

    def __init__(self, clock: MadeClock, start: CostModel) -> None:
        self.clock = clock
        self.layout = clock.layout
        self.cost = start
        self.slow_ranks = SlowRanks()
        self.messages: list[tuple[int, str]] = []
        self.regrets: list[float] = []
        self.num_left_out = 0
        self._sums = row_sums((), start, clock.layout)
        self._window: Steps = []
        self._number = 0

    def steps(self, count: int) -> None:
        for _ in range(count):
            lengths = drawn_lengths(self._number + 1)
            self.regrets.append(self._seconds(lengths, self.cost))
            self._run(self._plan(lengths, self.cost))

    def steps_of_one_plan(self, count: int) -> None:
        """Faster: the same samples in each step."""
        plan = self._plan(drawn_lengths(0), self.clock.true)
        for _ in range(count):
            self._run(plan)

    def _run(self, plan: Plan) -> None:
        self._number += 1
        self._window.append(self.clock.step(plan.steps[0]))
        if len(self._window) == INTERVAL:
            self._take()

    def _plan(self, lengths: np.ndarray, cost: CostModel) -> Plan:
        return build_dp_schedule(
            lengths, layout=self.layout, max_tokens_per_gpu=BUDGET, cost=cost, policy=Policy()
        )

    def _seconds(self, lengths: np.ndarray, cost: CostModel) -> float:
        """True seconds of a model's plan over those of the plan that knows the truth."""
        true = self.clock.true
        ours, oracle = (
            simulate(self._plan(lengths, model).steps[0], layout=self.layout, cost=true).makespan
            for model in (cost, true)
        )
        return ours / oracle

    def _take(self) -> None:
        steps, self._window = self._window, []
        candidate = fit_sums(self._faded(steps), self.cost, self.layout)
        ratios = np.zeros((self.layout.dp, self.layout.pp, len(steps)))
        for number, step in enumerate(steps):
            for cell, rows in step.items():
                ratios[(*cell, number)] = slowness(rows, candidate, self.layout)
        left_out, messages = self.slow_ranks.judge(ratios)
        self.num_left_out += int(left_out.sum())
        kept: Steps = [
            {cell: rows for cell, rows in step.items() if not left_out[(*cell, number)]}
            for number, step in enumerate(steps)
        ]
        self._sums = self._faded(kept)
        self.cost = fit_sums(self._sums, self.cost, self.layout)
        self.messages += [(self._number, message) for message in messages]

    def _faded(self, steps: Steps) -> Floats:
        """The sums so far, with those of these steps of all ranks."""
        sums = self._sums
        for step in steps:
            rows = [row for part in step.values() for row in part]
            sums = KEEP * sums + row_sums(rows, self.cost, self.layout)
        return sums


@pytest.mark.parametrize(
    ("layout", "true"),
    [
        (LAYOUT, TRUE),
        (Layout(dp=2, pp=2, vpp=2), replace(TRUE, stage_weights=(0.7, 0.9, 0.9, 1.5))),
        (Layout(dp=4), replace(TRUE, stage_weights=None)),
    ],
)
def test_constants_three_times_off_converge_within_20_steps(
    layout: Layout, true: CostModel
) -> None:
    run = Run(MadeClock(layout, true, noise=0.05), WRONG)
    run.steps(20)
    # Before the first fit some plan is worse than the oracle's by more than rounding.
    assert max(run.regrets[:INTERVAL]) > 1.01
    assert max(run.regrets[-INTERVAL:]) < 1.05
    model = run.cost
    for name in ("per_token", "per_token_sq", "backward_ratio", "weight_ratio"):
        assert getattr(model, name) == pytest.approx(getattr(true, name), rel=0.1), name
    # `fixed` is a few hundredths of a row's seconds, less than the noise.
    assert model.fixed == pytest.approx(true.fixed, rel=0.4)
    assert model.weights_for(layout) == pytest.approx(true.weights_for(layout), rel=0.03)


def test_exact_seconds_give_the_true_model() -> None:
    run = Run(MadeClock(LAYOUT, TRUE), WRONG)
    run.steps(3 * INTERVAL)
    model = run.cost
    for name in ("fixed", "per_token", "per_token_sq", "backward_ratio", "weight_ratio"):
        assert getattr(model, name) == pytest.approx(getattr(TRUE, name), rel=0.02), name


def test_a_stage_that_becomes_twice_as_slow_gets_its_weight() -> None:
    clock = MadeClock(LAYOUT, TRUE, noise=0.05)
    run = Run(clock, TRUE)
    run.steps_of_one_plan(50)
    clock.slow = {(0, 1): 2.0, (1, 1): 2.0}
    run.steps_of_one_plan(100)
    assert run.cost.weights_for(LAYOUT) == pytest.approx((0.5, 1.5), rel=0.05)
    assert run.messages == []
    assert run.num_left_out == 0


def test_a_rank_that_is_slow_for_a_while_leaves_the_model_as_it_is() -> None:
    clock = MadeClock(LAYOUT, TRUE, noise=0.02)
    run = Run(clock, WRONG)
    run.steps(12)
    clock.slow = {(1, 0): 1.6}
    run.steps(15)
    clock.slow = {}
    run.steps(8)
    begin, end = run.messages
    assert (begin[0], end[0]) == (15, 35)
    assert begin[1].startswith("DP rank 1 of stage 0 took 1.6")
    assert end[1] == "DP rank 1 of stage 0 is as fast as the stage's other ranks again"
    assert run.num_left_out == 15
    assert run.cost.per_token == pytest.approx(TRUE.per_token, rel=0.03)
    assert run.cost.weights_for(LAYOUT) == pytest.approx((0.8, 1.2), rel=0.02)


def test_a_wrong_model_names_no_rank() -> None:
    run = Run(MadeClock(LAYOUT, replace(TRUE, stage_weights=None), noise=0.05), WRONG)
    run.steps(20)
    assert run.messages == []
    assert run.num_left_out == 0


def test_a_pause_of_all_ranks_does_not_count() -> None:
    clock = MadeClock(LAYOUT, TRUE)
    run = Run(clock, TRUE)
    clock.slow = dict.fromkeys(np.ndindex(2, 2), 8.0)
    run.steps(1)
    clock.slow = {}
    run.steps(4)
    assert run.num_left_out == 4
    assert run.messages == []
    assert run.cost.per_token == pytest.approx(TRUE.per_token, rel=1e-3)


def test_a_machine_that_changes_is_followed_as_seconds_are_forgotten() -> None:
    clock = MadeClock(LAYOUT, TRUE, noise=0.05)
    run = Run(clock, TRUE)
    run.steps_of_one_plan(50)
    # As after a clock that went down: everything but the launches.
    clock.true = replace(TRUE, per_token=2e-6, per_token_sq=3e-10)
    run.steps_of_one_plan(100)
    assert run.cost.per_token == pytest.approx(2e-6, rel=0.1)


def test_rows_over_several_ranks_give_their_overhead() -> None:
    layout = Layout(dp=2)
    true = replace(TRUE, stage_weights=None, cp_overhead=0.3, cp_fixed=TRUE.fixed / 2)
    # Of several lengths and widths, or a part per token could not be told from a fixed one.
    rows = []
    for seed in range(3):
        plan = build_dp_schedule(
            np.concatenate([drawn_lengths(seed), [k * BUDGET // 4 for k in (2, 3, 5, 7)]]),
            layout=layout,
            max_tokens_per_gpu=BUDGET,
            cost=true,
            policy=Policy(context_parallel="dynamic"),
        )
        assert any(mb.width == 2 for mb in plan.steps[0].microbatches)
        measured = MadeClock(layout, true).step(plan.steps[0])
        rows += [row for own in measured.values() for row in own]
    sums = row_sums(rows, true, layout)
    model = replace(true, cp_overhead=0.05)
    for _ in range(5):
        model = fit_sums(sums, model, layout)
    assert model.cp_overhead == pytest.approx(0.3, abs=0.01)
    assert model.cp_fixed == pytest.approx(true.cp_fixed, rel=0.05)


def test_rows_that_cannot_tell_two_constants_apart_keep_them_as_they_were() -> None:
    # One sample in every row: `fixed` and `per_sample` are always together.
    clock = MadeClock(Layout(), replace(TRUE, stage_weights=None, per_sample=2e-4))
    start = replace(clock.true, per_token=2e-6)
    plan = build_dp_schedule(
        drawn_lengths(0), layout=Layout(), micro_batch_size=1, cost=start, policy=Policy()
    )
    sums = row_sums(clock.step(plan.steps[0])[0, 0], start, Layout())
    model = fit_sums(sums, start, Layout())
    assert model.per_token == pytest.approx(1e-6, rel=0.01)
    assert model.fixed == pytest.approx(3e-4, rel=0.05)
    assert model.per_sample == pytest.approx(2e-4, rel=0.05)


def test_seconds_of_images_are_found() -> None:
    random = np.random.default_rng(3)
    true = replace(TRUE, per_patch=2e-5, per_patch_sq=4e-9, tower_ratio=2.4)
    start = replace(TRUE, per_patch=6e-5, per_patch_sq=1e-9, tower_ratio=2.0)
    sums = np.zeros(8)
    for _ in range(40):
        patches = random.integers(64, 16384, random.integers(1, 6)).tolist()
        forward = float(true.image_seconds(patches).sum()) * random.uniform(0.98, 1.02)
        sums = KEEP * sums + image_sums(patches, forward, 2.4 * forward)
    found = fit_images(sums, start)
    assert found.per_patch == pytest.approx(true.per_patch, rel=0.05)
    assert found.per_patch_sq == pytest.approx(true.per_patch_sq, rel=0.05)
    assert found.tower_ratio == pytest.approx(true.tower_ratio)
    # Nothing was encoded, and no tower is trained.
    assert fit_images(np.zeros(8), start) == start
    frozen = fit_images(image_sums([1024], 1.0, None), replace(start, tower_ratio=0.0))
    assert frozen.tower_ratio == 0.0
    assert float(frozen.image_seconds([1024])[0]) == pytest.approx(1.0, rel=0.01)
