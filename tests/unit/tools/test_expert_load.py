"""The arithmetic of tools/expert_load.py."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from megapack import Layout, build_dp_schedule
from tools.expert_load import Recorded, measure
from tools.expert_loading.loads import (
    Assignment,
    LockstepTime,
    assignment,
    believed_counts,
    concentration,
    drawn_counts,
    expert_counts,
    rank_loads,
    search,
    slot_loads,
    waits,
)

pytestmark = pytest.mark.unit

# Two slots of a group of two ranks, with one sample per row.
WHERE = Assignment(
    slot=np.array([0, 0, 1, 1]),
    rank=np.array([0, 1, 0, 1]),
    num_slots=2,
    ep=2,
    num_groups=1,
    capacity=10,
)
TOKENS = np.array([4, 4, 4, 4])
# One layer. Samples 0 and 1 use the experts of rank 0 only, the others those of rank 1.
LOADS = np.array([[[4, 0]], [[4, 0]], [[0, 4]], [[0, 4]]], dtype=np.float64)


def test_choices_are_counted_by_layer_and_rank() -> None:
    routes = np.array([[[0, 3], [1, 2]], [[3, 2], [1, 0]]])
    counts = expert_counts(routes, 4)
    assert counts.tolist() == [[1, 0, 1, 2], [1, 2, 1, 0]]
    assert rank_loads(counts[None], 2).tolist() == [[[1, 3], [3, 1]]]


def test_waits_are_those_of_the_busiest_rank() -> None:
    """The docstring's example: 11 and 9 choices of 8."""
    loads = np.array([[[6, 2]], [[3, 5]]], dtype=np.float64)
    where = dataclasses.replace(WHERE, slot=np.array([0, 1]), rank=np.array([0, 0]))
    found = waits(loads, where)
    assert (found.plan, found.bound) == pytest.approx((11 / 8 - 1, 9 / 8 - 1))


def test_seconds_are_1_if_all_is_balanced() -> None:
    even = np.full((4, 1, 2), 2.0)
    slot, rank = WHERE.slot, WHERE.rank
    assert LockstepTime(TOKENS, even, 0.6, WHERE).step(slot, rank) == pytest.approx(1)
    # Each slot waits for one rank that has all choices.
    assert LockstepTime(TOKENS, LOADS, 0.6, WHERE).step(slot, rank) == pytest.approx(0.4 + 1.2)


def test_a_search_that_knows_experts_mixes_samples() -> None:
    slot, rank = search(TOKENS, LOADS, 0.6, WHERE, num_exchanges=100)
    assert waits(LOADS, dataclasses.replace(WHERE, slot=slot, rank=rank)).plan == 0
    assert np.bincount(slot * 2 + rank, weights=TOKENS).tolist() == [4, 4, 4, 4]
    blind, _ = search(TOKENS, np.full((4, 1, 2), 2.0), 0.6, WHERE, num_exchanges=100)
    assert blind.tolist() == WHERE.slot.tolist()


def test_what_planners_believe() -> None:
    counts = np.array([[[4, 0]], [[2, 2]], [[0, 4]], [[0, 4]]])
    groups = np.array([0, 0, 1, 1])
    assert believed_counts(counts, groups, "routes").tolist() == counts.tolist()
    assert believed_counts(counts, groups, "nothing")[0].tolist() == [[2, 2]]
    assert believed_counts(counts, groups, "step")[0].tolist() == [[1.5, 2.5]]
    assert believed_counts(counts, groups, "group")[:2].tolist() == [[[2, 2]], [[4, 0]]]


@pytest.mark.parametrize("c", [0.3, 3.0])
def test_the_concentration_of_drawn_counts_is_found(c: float) -> None:
    tokens = np.full(300, 400)
    counts = drawn_counts(tokens, 3, 8, 2, c, num_kinds=300, seed=0)
    assert counts.sum((1, 2)).tolist() == [400 * 2 * 3] * 300
    assert concentration(counts) == pytest.approx(c, rel=0.15)


def test_an_assignment_is_the_plans() -> None:
    lengths = [5, 9, 4, 7, 8, 3, 6, 2]
    plan = build_dp_schedule(lengths, layout=Layout(dp=4, ep=2), max_tokens_per_gpu=10)
    where = assignment(plan, 10)
    num_rows = plan.steps[0].num_microbatches
    assert (where.num_slots, where.num_groups) == (2 * num_rows, 2)
    for dp_rank, rows in enumerate(plan.steps[0].ranks):
        for position, row in enumerate(rows):
            for sample in row.samples:
                assert where.slot[sample] == dp_rank // 2 * num_rows + position
                assert where.rank[sample] == dp_rank % 2
    loads = np.ones((8, 2, 2))
    assert slot_loads(loads, where.slot, where.num_slots).sum() == loads.sum()


def test_no_gain_passes_the_limit() -> None:
    tokens = np.arange(20, 60)
    counts = drawn_counts(tokens, 2, 4, 2, 0.3, num_kinds=40, seed=0)
    step = Recorded(tokens, np.arange(40) // 4, counts)
    found = measure(step, Layout(dp=2, ep=2), num_exchanges=1000)
    assert found.bound_wait <= found.plan_wait
    assert max(found.gains.values()) <= found.limit
    assert found.gains["routes"] > 0
