"""Steps of exactly so many rollouts, whatever the order in which they arrive."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from megapack.errors import ConfigError, DataError
from megapack.samples import RolloutQueue

pytestmark = pytest.mark.unit


def test_each_rollout_is_in_one_step_with_all_its_samples() -> None:
    rng = random.Random(0)
    rollouts = {f"r{k}": [(k, turn) for turn in range(rng.randint(1, 6))] for k in range(101)}
    arriving = list(rollouts)
    rng.shuffle(arriving)
    queue: RolloutQueue[tuple[int, int]] = RolloutQueue(8)
    steps = []
    for name in arriving:
        queue.add(name, rollouts[name])
        if rng.random() < 0.2:  # The trainer asks now and then.
            while (step := queue.take()) is not None:
                steps.append(step)
    while (step := queue.take(allow_partial=True)) is not None:
        steps.append(step)
    assert len(queue) == 0
    assert [len({name for name, _ in step}) for step in steps] == [8] * 12 + [5]
    flat = [pair for step in steps for pair in step]
    assert flat == [(name, sample) for name in arriving for sample in rollouts[name]]


def test_a_step_waits_for_its_last_rollout() -> None:
    queue: RolloutQueue[str] = RolloutQueue(2)
    assert queue.take() is None
    assert queue.take(allow_partial=True) is None
    queue.add(7, ["a", "b", "c"])
    assert queue.take() is None
    queue.add(3, ["d"])
    queue.add(5, ["e"])
    assert queue.take() == [(7, "a"), (7, "b"), (7, "c"), (3, "d")]
    assert len(queue) == 1
    assert queue.take() is None


def test_a_rollout_is_added_once_and_has_samples() -> None:
    queue: RolloutQueue[str] = RolloutQueue(2)
    queue.add(7, ["a"])
    with pytest.raises(DataError, match="rollout 7 waits already; add each finished rollout once"):
        queue.add(7, ["a"])
    with pytest.raises(DataError, match="rollout 'x' has no samples"):
        queue.add("x", [])
    for size in (0, None, [2]):
        with pytest.raises(ConfigError, match="global_batch_size="):
            RolloutQueue(size)  # type: ignore[arg-type]


def test_names_and_samples_of_other_types_are_refused_before_they_wait() -> None:
    # Of any type, since what it is given here has types that its own refuses.
    queue: Any = RolloutQueue(1)
    for name in (None, 1.0, [1], True, 2**64):
        with pytest.raises(DataError, match=r"a rollout has the name .*; give an int64 or a str"):
            queue.add(name, ["a"])
    for samples in ((one for one in "ab"), 5):
        with pytest.raises(DataError, match="rollout 'y' has no samples in a list"):
            queue.add("y", samples)
    queue.add(np.int64(3), ["a"])
    assert queue.take() == [(3, "a")]
