from __future__ import annotations

import itertools

import numpy as np
import pytest

from megapack import (
    ConfigError,
    CostModel,
    Layout,
    MicroBatch,
    PlanError,
    StepPlan,
    build_dp_schedule,
    simulate,
)
from megapack.plan.order import KINDS, step_order

pytestmark = pytest.mark.unit

TOKENS = CostModel(per_token=1.0)
"""Time is in row tokens."""

SHAPES = [
    (1, 1, None, 3),
    (2, 1, None, 1),
    (2, 1, None, 5),
    (4, 1, None, 2),
    (4, 1, None, 9),
    (2, 2, None, 2),
    (2, 2, 3, 5),
    (4, 2, None, 8),
    (4, 3, 6, 10),
    (4, 2, 7, 12),
    (8, 4, 12, 20),
]


def step_of(rows: list[list[int]], group: int | None = None) -> StepPlan:
    ranks = tuple(
        tuple(MicroBatch((k,), tokens, tokens, tokens**2, tokens) for k, tokens in enumerate(row))
        for row in rows
    )
    return StepPlan(ranks, len(rows[0]), group, (), ())


@pytest.mark.parametrize(("pp", "vpp", "group", "count"), SHAPES)
def test_equal_micro_batches_match_the_closed_form(
    pp: int, vpp: int, group: int | None, count: int
) -> None:
    layout = Layout(pp=pp, vpp=vpp, microbatch_group_size=group)
    plan = build_dp_schedule([10] * count, layout=layout, max_tokens_per_gpu=10)
    assert plan.steps[0].num_microbatches == count
    simulation = simulate(plan.steps[0], layout=layout, cost=TOKENS)
    assert simulation.bubble_fraction == pytest.approx((pp - 1) / (vpp * count), abs=1e-12)
    work = 10 * count * 3 / pp
    assert simulation.makespan == pytest.approx(work * (1 + simulation.bubble_fraction))


@pytest.mark.parametrize(("pp", "vpp", "group", "count"), SHAPES)
@pytest.mark.parametrize("forward_only", [False, True])
def test_order_is_megatrons(
    pp: int, vpp: int, group: int | None, count: int, forward_only: bool
) -> None:
    """Against `get_pp_rank_microbatches` and `get_schedule_table` of megatron-core itself."""
    schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    if pp == 1:
        pytest.skip("Megatron's pipeline schedules need pp > 1")
    group = group or pp
    order = step_order(pp, vpp, count, group, forward_only)
    table = schedules.get_schedule_table(count, vpp, group)

    class Communicator:
        virtual_pipeline_model_parallel_size = vpp if vpp > 1 else None

        def __init__(self, rank: int) -> None:
            self.pp_group = self
            self.size = lambda: pp
            self.rank = lambda: rank

    for stage in range(pp):
        total, _, warmup, steady = schedules.get_pp_rank_microbatches(
            count, vpp, group, forward_only=forward_only, p2p_communicator=Communicator(stage)
        )
        forward = [("F", *pair) for pair in table]
        backward = [("B", k, vpp - 1 - chunk) for k, chunk in table]
        wanted = forward[:warmup]
        for k in range(steady):
            wanted += [forward[warmup + k], backward[k]]
        wanted += backward[steady:] if not forward_only else []
        mine = order.stage == stage
        found = [
            (KINDS[kind], int(k), int(chunk) // pp)
            for kind, k, chunk in zip(
                order.kind[mine], order.microbatch[mine], order.chunk[mine], strict=True
            )
        ]
        assert found == wanted
        assert total == count * vpp


@pytest.mark.parametrize(("pp", "vpp", "group", "count"), SHAPES)
def test_events_keep_every_dependency(pp: int, vpp: int, group: int | None, count: int) -> None:
    layout = Layout(dp=2, pp=pp, vpp=vpp, microbatch_group_size=group)
    rng = np.random.default_rng(count)
    rows = rng.integers(1, 100, (2, count)).tolist()
    cost = CostModel(fixed=1.0, per_token=1.0, p2p=0.25)
    simulation = simulate(step_of(rows, layout.group_size), layout=layout, cost=cost)
    ends = {(e.rank, e.kind, e.microbatch, e.chunk * pp + e.stage): e for e in simulation.events}
    assert len(ends) == 2 * 2 * count * pp * vpp
    for (rank, kind, k, model_chunk), event in ends.items():
        source = ends.get((rank, kind, k, model_chunk + (1 if kind == "B" else -1)))
        if source is None and kind == "B":
            source = ends[rank, "F", k, model_chunk]
            assert event.start >= source.end
        elif source is not None:
            assert event.start >= source.end + 0.25 - 1e-9
    for rank in range(2):
        for stage in range(pp):
            mine = [e for e in simulation.events if (e.rank, e.stage) == (rank, stage)]
            assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(mine))
    assert simulation.makespan == max(e.end for e in simulation.events)


def test_uneven_stages() -> None:
    layout = Layout(pp=2)
    cost = CostModel(per_token=1.0, stage_weights=(0.5, 1.5))
    simulation = simulate(step_of([[8, 8, 8]]), layout=layout, cost=cost)
    # Stage 1 waits 2 for the first forward, then takes 6 + 12 per micro-batch; stage 0's last
    # backward, of 4, ends the step.
    assert simulation.makespan == pytest.approx(2 + 3 * 18 + 4)
    assert simulation.bubble_fraction == pytest.approx(6 / 54)


def test_ranks_with_different_counts_and_lockstep() -> None:
    layout = Layout(dp=2)
    assert simulate(step_of([[1, 9], [9, 1]]), layout=layout, cost=TOKENS).makespan == 30
    assert (
        simulate(step_of([[1, 9], [9, 1]]), layout=layout, lockstep=True, cost=TOKENS).makespan
        == 54
    )
    uneven = step_of([[5], [1, 1, 1]])
    simulation = simulate(uneven, layout=layout, cost=TOKENS)
    assert simulation.rank_makespans == (15, 9)
    with pytest.raises(ConfigError, match="lockstep"):
        simulate(uneven, layout=layout, lockstep=True)


def test_forward_only_has_no_backwards() -> None:
    layout = Layout(pp=2)
    simulation = simulate(step_of([[4, 4, 4]]), layout=layout, forward_only=True, cost=TOKENS)
    assert {event.kind for event in simulation.events} == {"F"}
    assert simulation.makespan == 2 * 4
    assert simulation.peak_live_tokens == 4


def test_warm_up_sets_the_peak_of_live_tokens() -> None:
    rows = [[1, 2, 3, 4, 5, 6, 7, 8]]
    simulation = simulate(step_of(rows), layout=Layout(pp=4), cost=TOKENS)
    assert simulation.peak_in_flight == 4
    assert simulation.peak_live_tokens == 5 + 6 + 7 + 8
    layout = Layout(pp=2, vpp=2, cp=2)
    interleaved = simulate(step_of([[8] * 4], 2), layout=layout, cost=TOKENS)
    # Stage 0 holds 2 * (pp - 1) + (vpp - 1) * G = 4 warm-up forwards and 1, each half a stage.
    assert interleaved.peak_in_flight == 2.5
    assert interleaved.peak_live_tokens == 2.5 * 4


def test_counts_that_hang_are_refused() -> None:
    with pytest.raises(PlanError, match="legal count"):
        simulate(step_of([[5] * 5], 4), layout=Layout(pp=4, vpp=2))


def test_sizes_beyond_any_pipeline_are_refused() -> None:
    """Plans are read from files: their sizes must not ask for all memory."""
    step = step_of([[10]])
    with pytest.raises(ConfigError, match=r"pp \* vpp = 1099511627776 chunks"):
        simulate(step, layout=Layout(pp=2**20, vpp=2**20))
    with pytest.raises(ConfigError, match=r"M=8000 of pp \* vpp = 4096 chunks"):
        simulate(step_of([[10] * 8000]), layout=Layout(pp=4096))


def test_groups_smaller_than_the_pipeline_are_refused() -> None:
    with pytest.raises(PlanError, match=r"pp=4, vpp=2, G=2; .* G >= pp"):
        simulate(step_of([[10] * 4], group=2), layout=Layout(pp=4, vpp=2))
