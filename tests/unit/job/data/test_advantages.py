"""Advantages from rewards, by hand."""

from __future__ import annotations

import statistics
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapack.base.choices import AdvantageNorm
from megapack.errors import DataError
from megapack.job.data.advantages import SampleReward, group_advantages, penalize_overlong

pytestmark = pytest.mark.unit

# The batch of the docstring's table: two prompt groups of four rollouts.
REWARDS = [[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 0.0, 1.0]]
BATCH = [
    SampleReward(group, rollout, reward)
    for group, rewards in enumerate(REWARDS)
    for rollout, reward in enumerate(rewards)
]


def test_each_mode_gives_the_numbers_of_its_table() -> None:
    """Rows of the docstring, to the digits that it shows."""
    text = group_advantages.__doc__ or ""
    rows = [line.split("|")[1:4] for line in text.splitlines() if line.strip().startswith('| "')]
    assert len(rows) == 5
    for mode, *cells in rows:
        expected = [float(number) for cell in cells for number in cell.split(",")]
        found = group_advantages(BATCH, mode.strip().strip('"'))  # type: ignore[arg-type]
        assert found == pytest.approx(expected, abs=6e-4)


def test_leave_one_out_compares_with_the_mean_of_the_others() -> None:
    found = group_advantages([SampleReward(0, i, r) for i, r in enumerate([4.0, 1.0, 0.0])], "rloo")
    assert found.tolist() == [4.0 - 0.5, 1.0 - 2.0, 0.0 - 2.5]
    # Two samples of one rollout have the same baseline, the other rollout's reward.
    fan_out = [SampleReward(0, 0, 3.0), SampleReward(0, 0, 1.0), SampleReward(0, 1, 5.0)]
    assert group_advantages(fan_out, "rloo").tolist() == [3.0 - 5.0, 1.0 - 5.0, 5.0 - 2.0]
    assert group_advantages([SampleReward(0, 0, 3.0)], "rloo").tolist() == [0.0]


@pytest.mark.parametrize("num_turns", [1, 2, 5])
def test_a_rollout_of_many_turns_counts_once_in_its_group(num_turns: int) -> None:
    records = [SampleReward("a", 0, 1.0)] * num_turns
    records += [SampleReward("a", 1, 0.0), SampleReward("a", 2, 0.0), SampleReward("a", 2, 0.0)]
    assert group_advantages(records, "group") == pytest.approx([2 / 3] * num_turns + [-1 / 3] * 3)
    std = statistics.stdev([1.0, 0.0, 0.0]) + 1e-6
    expected = [2 / 3 / std] * num_turns + [-1 / 3 / std] * 3
    assert group_advantages(records, "group-std") == pytest.approx(expected)


def test_batch_norms_count_each_rollout_of_the_batch_once() -> None:
    # Rollout 0 of the first group has three samples; it counts like the others.
    records = [SampleReward("a", 0, 2.0)] * 3 + [SampleReward("a", 1, 0.0)]
    records += [SampleReward("b", 0, 7.0), SampleReward("b", 1, 3.0)]
    std = statistics.stdev([2.0, 0.0, 7.0, 3.0]) + 1e-6
    expected = [-1 / std] * 3 + [-3 / std, 4 / std, 0.0]
    assert group_advantages(records, "reinforce++") == pytest.approx(expected)
    std = statistics.stdev([1.0, -1.0, 2.0, -2.0]) + 1e-6
    expected = [1 / std] * 3 + [-1 / std, 2 / std, -2 / std]
    assert group_advantages(records, "reinforce++-baseline") == pytest.approx(expected)


@pytest.mark.parametrize("mode", ["reinforce++", "reinforce++-baseline"])
def test_given_advantages_are_no_part_of_the_batch(mode: Any) -> None:
    given_one = SampleReward("given", 0, reward=1e6, advantage=-2.0)
    found = group_advantages([given_one, *BATCH], mode)
    assert found[0] == -2.0
    assert found[1:].tolist() == group_advantages(BATCH, mode).tolist()
    assert group_advantages([given_one], mode).tolist() == [-2.0]
    # The standard deviation of one rollout is not defined.
    assert group_advantages([SampleReward(0, 0, 5.0)], mode).tolist() == [0.0]


def test_overlong_responses_lose_reward_linearly() -> None:
    records = [SampleReward(0, i, 1.0) for i in range(6)]
    records.append(SampleReward(0, 6, advantage=0.5))
    tokens = [80, 85, 90, 100, 120, 1, 200]
    options = {"max_response_tokens": 100, "buffer_tokens": 20}
    found = penalize_overlong(records, tokens, penalty=1.0, **options)
    assert [r.reward for r in found] == [1.0, 0.75, 0.5, 0.0, 0.0, 1.0, None]
    assert found[-1] == records[-1]
    twice = penalize_overlong(records, tokens, penalty=2.0, **options)
    assert [r.reward for r in twice] == [1.0, 0.5, 0.0, -1.0, -1.0, 1.0, None]


def test_advantages_within_prompt_groups() -> None:
    rewards = [1.0, 0.0, 0.0, 1.0]
    records = [SampleReward(0, i, reward) for i, reward in enumerate(rewards)] + [
        SampleReward(1, 0, 3.0)
    ]
    assert group_advantages(records).tolist() == [0.5, -0.5, -0.5, 0.5, 0.0]
    assert group_advantages(records, "none").tolist() == [*rewards, 3.0]
    std = np.std(rewards, ddof=1) + 1e-6
    expected = [0.5 / std, -0.5 / std, -0.5 / std, 0.5 / std, 0.0]
    assert group_advantages(records, "group-std") == pytest.approx(expected)


@pytest.mark.parametrize("mode", [mode for mode in get_args(AdvantageNorm) if mode != "none"])
@given(reward=st.floats(-1e6, 1e6), count=st.integers(1, 9))
def test_equal_rewards_give_exactly_zero(mode: Any, reward: float, count: int) -> None:
    records = [SampleReward(0, index, reward) for index in range(count)]
    assert group_advantages(records, mode).tolist() == [0.0] * count


def test_given_advantages_are_used_and_not_mixed() -> None:
    records = [SampleReward(0, 0, advantage=0.25, reward=9.0), SampleReward(0, 1, advantage=-2.0)]
    assert group_advantages(records, "group-std").tolist() == [0.25, -2.0]
    with pytest.raises(DataError, match="with and without `advantage`"):
        group_advantages([*records, SampleReward(0, 2, reward=1.0)])
    with pytest.raises(DataError, match="group 'g' has a sample with neither"):
        group_advantages([SampleReward("g", 0, reward=1.0), SampleReward("g", 1)])


@pytest.mark.parametrize("rewards", [[1e308, -1e308], [0.0, 1.7e308, 1.7e308], [0.0, -1e200]])
def test_rewards_whose_differences_overflow_are_refused(rewards: list[float]) -> None:
    records = [SampleReward(0, rollout, reward=reward) for rollout, reward in enumerate(rewards)]
    with pytest.raises(DataError, match=r"group 0 has a reward of -?1.*; give rewards of at most"):
        group_advantages(records, "group-std")
    assert group_advantages(records, "none").tolist() == rewards
