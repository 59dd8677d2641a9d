"""Slow ranks, pauses and stages, from hand-made ratios."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megapack import CostModel, Layout
from megapack.cost.slowness import MovedStages, SlowRanks

pytestmark = pytest.mark.unit


def test_of_two_ranks_the_faster_one_is_the_measure() -> None:
    ratios = np.ones((2, 1, 4))
    ratios[0] = 1.5
    verdict = SlowRanks().judge(ratios)
    assert verdict.left_out[0].all()
    assert not verdict.left_out[1].any()
    assert verdict.messages[0].startswith("DP rank 0 of stage 0 took 1.50 times")


def test_one_slow_step_is_left_out_and_not_named() -> None:
    ratios = np.ones((3, 2, 5))
    ratios[1, 0, 2] = 1.3
    ranks = SlowRanks()
    verdict = ranks.judge(ratios)
    assert np.argwhere(verdict.left_out).tolist() == [[1, 0, 2]]
    assert verdict.messages == ()
    assert ranks.slow == ()


def test_a_slow_rank_is_named_once_and_again_when_it_is_over() -> None:
    slow = np.ones((4, 1, 5))
    slow[2] = 2.0
    fast = np.ones((4, 1, 5))
    ranks = SlowRanks()
    counts = [len(ranks.judge(ratios).messages) for ratios in (slow, slow, fast, fast)]
    assert counts == [1, 0, 1, 0]


def test_ranks_without_rows_are_no_measure() -> None:
    ratios = np.zeros((2, 1, 3))
    ratios[1] = 3.0
    verdict = SlowRanks().judge(ratios)
    assert not verdict.left_out.any()
    assert verdict.messages == ()


def test_all_ranks_slow_are_no_slow_rank() -> None:
    assert SlowRanks().judge(np.full((4, 2, 5), 3.0)).messages == ()


def test_a_stage_that_drifts_is_named_when_it_has_moved_enough() -> None:
    layout = Layout(pp=2, vpp=2)
    stages = MovedStages(layout, CostModel())

    def weights(factor: float) -> CostModel:
        # Stage 1 has the chunks 1 and 3.
        values = np.array([1.0, factor, 1.0, factor])
        return replace(CostModel(), stage_weights=tuple((values / values.mean()).tolist()))

    assert stages.judge(weights(1.2)) == []
    (message,) = stages.judge(weights(1.4))
    assert message == (
        "stage 1 takes 1.40 times as long as the cost model had it against the other stages; "
        "its weight went from 1.00 to 1.17"
    )
    assert stages.judge(weights(1.5)) == []


def test_one_stage_has_nothing_to_compare_with() -> None:
    stages = MovedStages(Layout(vpp=1), CostModel())
    assert stages.judge(CostModel(stage_weights=(1.0,))) == []
