"""Fully asynchronous rollouts: slime and miles plan whatever rollouts are there when a step begins.

Groups arrive in the order in which they finish, so ids are in no order; a rollout has a sample for
each turn, or for each part of an agent's work.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from megapack.hosts import miles, slime
from tests.hosts.rollouts import make_args, make_config, rows_of

pytestmark = pytest.mark.hosts


@pytest.mark.parametrize("host", [slime, miles])
@pytest.mark.parametrize("num_rollouts", range(8, 33, 3))
def test_any_number_of_rollouts_is_planned_in_order_of_arrival(
    host: Any, num_rollouts: int
) -> None:
    rng = random.Random(num_rollouts)
    groups = [[1000 * g + k for k in range(4)] for g in range(8)]
    rng.shuffle(groups)
    arrived = [rollout for group in groups for rollout in group][:num_rollouts]
    ids = [rollout for rollout in arrived for _ in range(rng.randint(1, 6))]
    # Samples of agents that work side by side finish among each other.
    for k in range(0, len(ids) - 8, 9):
        part = ids[k : k + 8]
        rng.shuffle(part)
        ids[k : k + 8] = part
    lengths = [rng.randint(3, 60) for _ in ids]
    order = list(dict.fromkeys(ids))
    config = make_config(dp=2)
    schedule = host.build_dp_schedule(
        make_args(max_tokens_per_gpu=128, allow_partial_train_step=True),
        config,
        lengths,
        global_batch_size=8,
        rollout_indices=ids,
    )
    _, _, num_microbatches, kept = schedule
    wanted = [8] * (num_rollouts // 8)
    if host is miles and num_rollouts % 8:  # Only miles has a step of what is left.
        wanted.append(num_rollouts % 8)
    assert kept == wanted
    first = begin = 0
    for count, size in zip(num_microbatches, kept, strict=True):
        own = [rank[first : first + count] for rank in rows_of(schedule)]
        found = sorted(i for rank in own for row in rank for i in row)
        step = set(order[begin : begin + size])
        assert found == [i for i, rollout in enumerate(ids) if rollout in step]
        first, begin = first + count, begin + size
