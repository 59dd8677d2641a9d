"""Slow ranks and pauses, from hand-made ratios."""

from __future__ import annotations

import numpy as np
import pytest

from megapack.cost.slowness import SlowRanks

pytestmark = pytest.mark.unit


def test_of_two_ranks_the_faster_one_is_the_measure() -> None:
    ratios = np.ones((2, 1, 4))
    ratios[0] = 1.5
    left_out, messages = SlowRanks().judge(ratios)
    assert left_out[0].all()
    assert not left_out[1].any()
    assert messages[0].startswith("DP rank 0 of stage 0 took 1.50 times")


def test_one_slow_step_is_left_out_and_not_named() -> None:
    ratios = np.ones((3, 2, 5))
    ratios[1, 0, 2] = 1.3
    ranks = SlowRanks()
    left_out, messages = ranks.judge(ratios)
    assert np.argwhere(left_out).tolist() == [[1, 0, 2]]
    assert messages == []
    assert ranks.slow == set()


def test_ranks_without_rows_are_no_measure() -> None:
    ratios = np.zeros((2, 1, 3))
    ratios[1] = 3.0
    left_out, messages = SlowRanks().judge(ratios)
    assert not left_out.any()
    assert messages == []
