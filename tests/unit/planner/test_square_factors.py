"""Stages with other shares of attention: two weights, in the planner and in the simulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megapack import CostModel, Layout, Plan, Policy, build_dp_schedule, check_plan, simulate
from megapack.cost.fit import Measurement
from megapack.cost.online import ChunkSeconds, fit_sums, row_sums
from megapack.errors import ConfigError, PlanError
from megapack.planner.items import Items
from megapack.planner.scored import Way
from megapack.planner.search import best_draft
from megapack.planner.step import Step
from megapack.policy import Backward

pytestmark = pytest.mark.unit

# All attention is on the second stage of two.
COST = CostModel(
    fixed=20.0,
    per_token=1.0,
    per_token_sq=1 / 1000,
    stage_weights=(1.2, 0.8),
    square_factors=(0.0, 2.5),
    p2p=5.0,
)
LENGTHS = [1700, 300, 900, 100, 600, 1200, 250, 50, 800, 400, 1500, 700, 150, 350, 500, 1000]


def planned(layout: Layout, cost: CostModel | None = COST, **policy: Any) -> Plan:
    return build_dp_schedule(
        LENGTHS,
        layout=layout,
        max_tokens_per_gpu=2000,
        cost=cost,
        policy=Policy(search=200, **policy),
    )


def test_seconds_of_a_row_on_each_stage() -> None:
    plan = build_dp_schedule([30, 40], layout=Layout(pp=2), max_tokens_per_gpu=100, cost=COST)
    (step,) = plan.steps
    run = simulate(step, layout=plan.layout, cost=COST)
    microbatches = step.ranks[0]
    for event in run.events:
        row = microbatches[event.microbatch]
        linear = COST.fixed + row.row_tokens / 2
        squares = row.tokens_sq / 1000 / 2
        seconds = 1.2 * linear if event.stage == 0 else 0.8 * (linear + 2.5 * squares)
        passes = 1 if event.kind == "F" else 2
        assert event.end - event.start == pytest.approx(passes * seconds)


@pytest.mark.parametrize(
    ("layout", "policy"),
    [
        (Layout(dp=2, pp=2), {}),
        (Layout(dp=2, pp=2, ep=2), {}),
        (Layout(dp=2, pp=2), {"context_parallel": "dynamic"}),
        pytest.param(
            Layout(dp=2, pp=2),
            {"split_samples": "auto", "backward": "split"},
            marks=pytest.mark.weekly,
        ),
        (
            Layout(dp=2, pp=2),
            {"split_samples": "auto", "backward": "split", "context_parallel": "dynamic"},
        ),
    ],
)
def test_the_search_times_what_the_simulator_does(
    layout: Layout, policy: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seconds of the draft that was chosen are those of the plan."""
    plan = planned(layout, **policy)
    check_plan(plan, LENGTHS)
    step = Step(
        number=0,
        lengths=np.array(LENGTHS),
        layout=layout,
        policy=plan.policy,
        cost=COST,
        budget=2000,
    )
    samples = np.arange(len(LENGTHS))
    draft = best_draft(Items.whole(step, samples, samples))
    simulated = simulate(plan.steps[0], layout=layout, cost=COST, lockstep=layout.ep_spans_dp)
    if draft.widths.max() == 1 and not plan.steps[0].orders:
        scored = Way(draft.items, is_real=True).score_draft(draft)
        assert scored.seconds == pytest.approx(simulated.makespan)
    assert draft.seconds() == pytest.approx(simulated.makespan)


def test_knowing_the_shares_is_faster() -> None:
    """Plans are compared under the true costs: the factors, and one weight per stage."""
    layout = Layout(dp=2, pp=2)
    seconds = []
    for cost in (COST, replace(COST, square_factors=None)):
        (step,) = planned(layout, cost).steps
        seconds.append(simulate(step, layout=layout, cost=COST).makespan)
    assert seconds[0] < seconds[1]


def test_an_online_fit_keeps_the_factors() -> None:
    layout = Layout(pp=2)
    rng = np.random.default_rng(0)
    true = replace(COST, per_token=1.3, per_token_sq=1 / 600, stage_weights=(0.9, 1.1))
    assert true.stage_weights is not None
    assert true.square_factors is not None
    rows = []
    for tokens in rng.integers(100, 2000, 40).tolist():
        squares = tokens * int(rng.integers(50, tokens))
        sizes = {"row_tokens": tokens, "tokens_sq": squares, "num_samples": 3}
        for chunk in range(2):
            factor = true.square_factors[chunk]
            forward = true.stage_weights[chunk] * true.forward_seconds(
                layout, **sizes, square_factor=factor
            )
            row = Measurement(tokens, squares, 3, forward, 2 * forward)
            rows.append(ChunkSeconds(chunk, row))
    found = fit_sums(row_sums(rows, COST, layout), COST, layout)
    assert found.square_factors == COST.square_factors
    assert found.stage_weights == pytest.approx(true.stage_weights, rel=1e-2)
    assert found.per_token_sq == pytest.approx(true.per_token_sq, rel=2e-2)


def test_rows_lie_over_no_more_ranks_than_heads_divide() -> None:
    layout = Layout(dp=8, pp=1)
    lengths = [30000, *LENGTHS]
    plans = {}
    for widest in (None, 4, 2):
        plans[widest] = build_dp_schedule(
            lengths,
            layout=layout,
            max_tokens_per_gpu=16000,
            cost=replace(COST, stage_weights=None, square_factors=None),
            policy=Policy(context_parallel="dynamic", max_width=widest),
        )
        check_plan(plans[widest], lengths)
        found = max(mb.width for mb in plans[widest].steps[0].microbatches)
        assert found == (widest or 8)
    text = replace(plans[None], policy=plans[2].policy)
    with pytest.raises(PlanError, match="lies over 8 ranks, max_width=2"):
        check_plan(text, lengths)
    with pytest.raises(PlanError, match="no aligned block of up to 2 of dp=8 ranks"):
        build_dp_schedule(
            lengths,
            layout=layout,
            max_tokens_per_gpu=4000,
            policy=Policy(context_parallel="dynamic", max_width=2),
        )
    with pytest.raises(ConfigError, match="max_width=0"):
        Policy(max_width=0)


@pytest.mark.parametrize("layout", [Layout(dp=2, pp=4, cp=2), Layout(dp=2, pp=4, vpp=2)])
@pytest.mark.parametrize("backward", ["joint", "split"])
def test_no_piece_is_shorter_than_its_state_is_worth(layout: Layout, backward: Backward) -> None:
    """Moves shift cuts, and still leave each piece its tokens."""
    lengths = [6000, 3000, *LENGTHS]
    cost = replace(COST, stage_weights=None, square_factors=None)
    shortest = {}
    for least in (None, 1, 1100):
        policy = Policy(split_samples="auto", backward=backward, least_piece=least)
        plan = build_dp_schedule(
            lengths, layout=layout, max_tokens_per_gpu=4000, cost=cost, policy=policy
        )
        check_plan(plan, lengths)
        parts = [part for mb in plan.steps[0].microbatches for part in mb.pieces]
        assert parts
        ends = np.array([layout.aligned_sample_tokens(part.end) for part in parts])
        shortest[least] = min(ends - [part.begin for part in parts])
    assert shortest[1] == shortest[None] < 1100 <= shortest[1100]


@pytest.mark.parametrize("num_tokens", [1001, 1999, 2001])
def test_a_row_that_holds_no_two_shortest_pieces_holds_two_halves(num_tokens: int) -> None:
    """A sample over the budget is cut whatever its pieces cost."""
    policy = Policy(split_samples="auto", least_piece=900, search=0)
    layout = Layout(pp=4)
    cost = replace(COST, stage_weights=None, square_factors=None)
    plan = build_dp_schedule(
        [num_tokens], layout=layout, max_tokens_per_gpu=1000, cost=cost, policy=policy
    )
    check_plan(plan, [num_tokens])
    parts = [part.end - part.begin for mb in plan.steps[0].microbatches for part in mb.pieces]
    assert sum(parts) == num_tokens
    assert min(parts) >= 500


@pytest.mark.parametrize("factors", [(1.0,), (1.0, -1.0), 3])
def test_factors_are_numbers_one_per_chunk(factors: Any) -> None:
    with pytest.raises(ConfigError, match="square_factors"):
        planned(Layout(pp=2), replace(COST, square_factors=factors))
