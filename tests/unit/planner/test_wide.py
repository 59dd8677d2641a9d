"""Rows over several DP ranks: what the search gains, and what it must not do."""

from __future__ import annotations

import dataclasses
from typing import Any

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
from megapack.pipeline.simulator import Runner, simulate_planned
from megapack.planner.board import (
    Board,
    RowCost,
    clear_row,
    clone,
    empty_board,
    first_rank,
    put,
)
from megapack.planner.clock import Clock, score_shared
from megapack.planner.fill import FillRule, fill_board
from megapack.planner.improve import improve_blocks

pytestmark = pytest.mark.unit

COST = CostModel(fixed=100.0, per_token=1.0, per_token_sq=1 / 12288)
DYNAMIC = Policy(context_parallel="dynamic")
RNG = np.random.default_rng(7)
SHORT = np.clip(RNG.lognormal(6, 0.8, 120), 1, 4000).astype(int).tolist()
# One sample has a quarter of all work.
ONE_LONG = [*SHORT, 12000]
LAYOUTS = [
    Layout(dp=8),
    Layout(dp=4, pp=4),
    Layout(dp=4, pp=4, vpp=2),
    Layout(dp=2, pp=4, vpp=2, microbatch_group_size=6),
    Layout(dp=4, pp=2, ep=4),
    Layout(dp=6, pp=2, cp=2),
]


def planned(lengths: list[int], layout: Layout, policy: Policy, **arguments: Any) -> Plan:
    arguments = {"max_tokens_per_gpu": 32768, "cost": COST, **arguments}
    plan = build_dp_schedule(lengths, layout=layout, policy=policy, **arguments)
    check_plan(plan, lengths)
    return plan


def seconds(plan: Plan, cost: CostModel | None = COST) -> float:
    return sum(simulate_planned(plan, step, cost).makespan for step in plan.steps)


def widths(plan: Plan) -> list[int]:
    return sorted(mb.width for step in plan.steps for mb in step.microbatches)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_long_sample_no_longer_decides_the_step(layout: Layout) -> None:
    fixed = seconds(planned(ONE_LONG, layout, Policy()))
    plan = planned(ONE_LONG, layout, DYNAMIC)
    even = sum(n + n * n / 12288 for n in ONE_LONG) * 3 / (layout.dp * layout.pp * layout.cp)
    assert seconds(plan) < 1.8 * even < fixed
    assert widths(plan)[-1] > 1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("search", [0, 256])
def test_samples_over_the_budget_go_over_as_many_ranks_as_hold_them(
    layout: Layout, search: int
) -> None:
    lengths = [*SHORT, 4000 * layout.widths[-1] * layout.cp, 5000 * layout.cp]
    policy = dataclasses.replace(DYNAMIC, search=search, oversize="error")
    plan = planned(lengths, layout, policy, max_tokens_per_gpu=4096)
    width = {i: mb.width for mb in plan.steps[0].microbatches for i in mb.samples}
    assert width[len(SHORT)] == layout.widths[-1]
    assert width[len(SHORT) + 1] >= 2


def test_a_sample_that_fits_on_no_group_is_named_with_what_to_set() -> None:
    layout = Layout(dp=6, pp=2)
    with pytest.raises(PlanError, match=r"sample 2: 4001 tokens.* 4 of dp=6 ranks.* to 1002 or"):
        planned([9, 9, 4001], layout, DYNAMIC, max_tokens_per_gpu=1000)
    planned([9, 9, 4001], layout, DYNAMIC, max_tokens_per_gpu=1002)


def test_colocated_samples_over_the_budget_go_over_ranks_together() -> None:
    lengths = [700, 700, 50, 60, 70, 80]
    plan = planned(
        lengths,
        Layout(dp=2),
        DYNAMIC,
        max_tokens_per_gpu=750,
        colocate_ids=["a", "a", "b", "b", "c", "c"],
    )
    pair = next(mb for mb in plan.steps[0].microbatches if 0 in mb.samples)
    assert 1 in pair.samples
    assert pair.width == 2
    with pytest.raises(PlanError, match=r"samples \[0, 1\] of colocate id 'a': 1400 tokens"):
        planned(
            lengths,
            Layout(dp=2),
            DYNAMIC,
            max_tokens_per_gpu=650,
            colocate_ids=["a", "a", "b", "b", "c", "c"],
        )


def test_long_samples_share_a_wide_row() -> None:
    """Two samples over the budget of two ranks, and a budget with room for both of them there."""
    plan = planned([600, 390], Layout(dp=2), DYNAMIC, max_tokens_per_gpu=500)
    (row,) = plan.steps[0].microbatches
    assert row.samples == (0, 1)
    assert row.width == 2


@pytest.mark.parametrize("layout", LAYOUTS[1:4])
def test_live_tokens_stay_below_the_cap(layout: Layout) -> None:
    free = simulate(planned(ONE_LONG, layout, DYNAMIC).steps[0], layout=layout).peak_live_tokens
    cap = int(free * 0.7)
    policy = dataclasses.replace(DYNAMIC, max_live_tokens_per_gpu=cap)
    plan = planned(ONE_LONG, layout, policy)
    assert simulate(plan.steps[0], layout=layout).peak_live_tokens <= cap


@pytest.mark.parametrize("unreachable", ["drop", "error"])
def test_no_micro_batch_is_padding_unless_the_policy_allows_it(unreachable: Any) -> None:
    policy = dataclasses.replace(DYNAMIC, unreachable=unreachable)
    for layout in LAYOUTS:
        plan = planned([*SHORT[:40], 9000], layout, policy, max_tokens_per_gpu=6000)
        assert all(mb.samples for mb in plan.steps[0].microbatches)


def test_forward_only_steps_go_over_ranks_too() -> None:
    plan = planned(ONE_LONG, Layout(dp=4, pp=2), DYNAMIC, forward_only=True)
    fixed = planned(ONE_LONG, Layout(dp=4, pp=2), Policy(), forward_only=True)
    assert seconds(plan) < 0.7 * seconds(fixed)


def test_shared_prefixes_and_wide_rows_together() -> None:
    lengths = [*[900] * 16, *SHORT[:40], 12000]
    groups = [*[0] * 16, *range(1, 42)]
    prefixes = SharedPrefixes.from_groups(groups, [800] * 16 + [1] * 41)
    layout = Layout(dp=4, pp=2)
    plan = planned(lengths, layout, DYNAMIC, prefixes=prefixes)
    fixed = planned(lengths, layout, Policy(), prefixes=prefixes)
    assert seconds(plan) < 0.7 * seconds(fixed)
    assert sum(mb.shared_tokens for mb in plan.steps[0].microbatches) > 0
    assert widths(plan)[-1] == 4


def test_one_row_per_sample_is_found_among_more_than_a_hundred() -> None:
    # Fewer of them hold all tokens, but no two samples fit into a row.
    lengths = [7864] * 105
    plan = planned(lengths, Layout(dp=8), DYNAMIC, max_tokens_per_gpu=1024)
    assert plan.steps[0].num_microbatches == 105
    assert widths(plan) == [8] * 105


def test_a_single_rank_has_no_wide_rows() -> None:
    plan = planned(ONE_LONG, Layout(pp=4), DYNAMIC)
    assert widths(plan)[-1] == 1
    assert seconds(plan) == seconds(planned(ONE_LONG, Layout(pp=4), Policy()))


class TestBoard:
    """The arrays of the search after many moves are those of the same rows made anew."""

    cost = RowCost(
        fixed=np.array([2.0, 2.0, 2.5]),
        per_token=np.array([1.0, 0.6, 0.3]),
        per_token_sq=np.array([0.01, 0.006, 0.003]),
        per_sample=np.array([1.0, 0.6, 0.3]),
        square_factors=np.ones(1),
        unit=np.array([1, 4, 8]),
        capacity=np.array([100, 200, 400]),
        alone=np.array([100, 200, 400]),
        lengths=np.zeros(0, dtype=np.int64),
        uniform_tokens=0,
        max_live=0.0,
        fixed_rows=False,
        allows_padding=True,
    )

    def empty(self, dp: int, count: int) -> Board:
        tokens = np.array([350, 180, 90, 70, 60, 50, 40, 30, 20, 10, 9, 8, 7, 6])
        unit = np.array([1, 4, 8])[:, None]
        aligned = -(-tokens // unit) * unit
        samples = np.ones(tokens.size, dtype=np.int64)
        none = np.zeros_like(samples)
        whole = (none, none, none - 1)
        shape = dp, count
        return empty_board(self.cost, aligned, aligned * aligned, samples, whole, shape)

    def filled(self) -> tuple[Board, FillRule]:
        board = self.empty(5, 6)
        num_items = board.row_of.size
        least = np.array([2, 1] + [0] * (num_items - 2))
        rule = FillRule(np.arange(num_items), least, np.full((5, 6), 60.0))
        assert fill_board(board, rule, 1.15)
        return board, rule

    def clock(self, *, lockstep: bool) -> Clock:
        return Clock(Runner(Layout(dp=5, pp=2), CostModel()).ops(6), lockstep)

    def by_cell(self, board: Board) -> list[Any]:
        """What each cell shows, whatever its row's number is."""
        columns = (board.tokens, board.tokens_sq, board.num_samples, board.num_items, board.level)
        return [[column[row] for column in columns] for row in board.rows.ravel()]

    @pytest.mark.parametrize("lockstep", [False, True])
    def test_moves_keep_the_sums(self, lockstep: bool) -> None:
        board, rule = self.filled()
        clock = self.clock(lockstep=lockstep)
        before = score_shared(board, clock, None)
        clones = (clone(board), clone(board))
        improve_blocks(board, *clones, clock, None, rule, 3000, 0.0)
        after = board.seconds.max()
        assert after < before
        fresh = self.empty(5, 6)
        for rank, position in np.ndindex(board.rows.shape):
            row = board.rows[rank, position]
            if first_rank(board, rank, position) == rank:
                for item in np.flatnonzero(board.row_of == row):
                    put(fresh, int(item), rank, position, int(board.level[row]))
        assert score_shared(fresh, clock, None) == pytest.approx(after)
        assert self.by_cell(fresh) == self.by_cell(board)
        seconds = [own.row_seconds[own.rows] for own in (fresh, board)]
        assert np.allclose(*seconds)
        assert (rule.least <= board.level[board.row_of]).all()
        # Each row is shown or spare, and none is both.
        spare = board.spare[: board.num_spare[0]]
        assert sorted([*np.unique(board.rows), *spare]) == list(range(30))

    def test_a_cleared_row_leaves_nothing_behind(self) -> None:
        board, _ = self.filled()
        taken = np.empty(board.row_of.size, dtype=np.int64)
        size = 0
        for rank, position in np.ndindex(board.rows.shape):
            size = clear_row(board, rank, position, taken, size)
        assert sorted(taken[:size]) == list(range(board.row_of.size))
        empty = self.empty(5, 6)
        assert np.unique(board.rows).size == 30
        for name in ("tokens", "tokens_sq", "num_items", "level", "row_seconds", "head", "row_of"):
            assert np.array_equal(getattr(empty, name), getattr(board, name)), name

    def test_padding_that_is_forbidden_takes_forever(self) -> None:
        board, _ = self.filled()
        board = board._replace(cost=self.cost._replace(allows_padding=False))
        clock = self.clock(lockstep=False)
        assert score_shared(board, clock, None) == np.inf
