"""What the samples of a data set have in common, and plans of a batch that share it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megapack.job.config.sections import PlanConfig
from megapack.job.data.batches import batch_prefixes, plan_logprobs, plan_steps
from megapack.job.data.dataset import Dataset
from megapack.job.data.token_blocks import ReadSettings
from megapack.layout import Layout
from megapack.plan.check import check_plan

pytestmark = pytest.mark.unit

SYSTEM = [9, 9, 0, 9]
# A masked response token is stored as another number than an unmasked one, and id 0 as -1.
ROWS: list[dict[str, Any]] = [
    {"prompt_ids": [*SYSTEM, 5, 6], "response_ids": [7, 8], "group": "a"},
    {"prompt_ids": [*SYSTEM, 1], "response_ids": [2], "group": "b"},
    {"prompt_ids": [*SYSTEM, 5, 6], "response_ids": [7, 9], "group": "a"},
    {"prompt_ids": [3, 3], "response_ids": [4]},
    # The second turn of sample 0: its answer is now a prompt, or counts no longer.
    {"prompt_ids": [*SYSTEM, 5, 6, 7, 8], "response_ids": [1, 1], "group": "a"},
    {
        "prompt_ids": SYSTEM[:2],
        "response_ids": [*SYSTEM[2:], 5, 6, 7, 8, 1, 2],
        "response_mask": [0, 0, 0, 0, 0, 1, 0, 1],
        "group": "a",
    },
]


def dataset(tmp_path: Path, rows: list[dict[str, Any]]) -> Dataset:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Dataset.from_files(path, ReadSettings(vocab_size=100), tmp_path)


def test_beginnings_are_compared_by_token_ids_across_groups_turns_and_masks(tmp_path: Path) -> None:
    data = dataset(tmp_path, ROWS)
    prefixes = data.prefixes(np.arange(6))
    assert prefixes.order == (1, 0, 4, 5, 2)
    assert prefixes.common == (0, 4, 8, 9, 7)
    # Numbers of a batch count from its own first sample.
    part = data.prefixes(np.array([5, 3, 0]))
    assert part.order == (2, 0)
    assert part.common == (0, 8)
    assert data.prefixes(np.array([1, 3])).order == ()
    assert data.prefixes(np.arange(6), mtp_num_layers=1).own_tokens == 2


def test_routes_limit_what_is_shared_only_if_they_are_replayed(tmp_path: Path) -> None:
    rows = [dict(row) for row in ROWS[:3]]
    for row in rows:
        length = len(row["prompt_ids"]) + len(row["response_ids"])
        row["routed_experts"] = [[[k % 4, 5]] for k in range(length)]
    # Token 3 of sample 2 went to another expert.
    rows[2]["routed_experts"][3] = [[4, 5]]
    data = dataset(tmp_path, rows)
    free = data.prefixes(np.arange(3))
    assert dict(zip(free.order, free.common, strict=True)) == {1: 0, 0: 4, 2: 7}
    replayed = data.prefixes(np.arange(3), replays_routes=True)
    # Samples keep the last common token for themselves, whose route may differ.
    assert dict(zip(replayed.order, replayed.common, strict=True)) == {1: 0, 0: 4, 2: 4}
    rows[0].pop("routed_experts")
    assert dataset(tmp_path, rows).prefixes(np.arange(3), replays_routes=True).order == (1, 2)


@pytest.mark.parametrize("share", ["auto", "off"])
def test_plans_of_a_batch_share_if_the_config_says_so(tmp_path: Path, share: Any) -> None:
    data = dataset(tmp_path, ROWS)
    numbers = np.arange(6)
    config = PlanConfig(max_tokens_per_gpu=24, forward_max_tokens_per_gpu=64, share_prefixes=share)
    prefixes = batch_prefixes(config, data, numbers, mtp_num_layers=0, replays_routes=False)
    assert (prefixes is None) == (share == "off")
    lengths = np.array(data.prompt_tokens(numbers)) + np.array(data.response_tokens(numbers))
    settings = (config, Layout(), None, lengths.tolist())
    plan = plan_steps(*settings, data.rollout_ids(numbers), prefixes=prefixes)
    forward_plan = plan_logprobs(*settings, prefixes)
    assert forward_plan is not None
    for planned in (plan, forward_plan):
        check_plan(planned, lengths.tolist())
        assert planned.counts.tokens == lengths.sum()
        assert (planned.counts.shared_tokens > 0) == (share == "auto")
    # One row of all samples: 3 + 8 + 8 + 6 positions of neighbours. The second turn has all of the
    # first one.
    if share == "auto":
        assert forward_plan.counts.shared_tokens == 25
