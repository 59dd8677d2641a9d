"""A config's data set, and the advantages of its batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megapack.errors import DataError
from megapack.job.config.objective import ObjectiveConfig
from megapack.job.config.sections import DataConfig, PlanConfig, TrainConfig
from megapack.job.data.batches import all_batches, batch_advantages, open_dataset, steps_in

pytestmark = pytest.mark.unit

PAIRS = {"kind": "dpo", "loss_weighting": "seq-mean-token-mean"}
PLAIN = {"prompt": "a", "response": "b", "reward": 1.0}
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}


def config(tmp_path: Path, rows: list[dict[str, Any]], objective: Any, **data: Any) -> TrainConfig:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return TrainConfig(
        name="run",
        runs_dir=str(tmp_path),
        plan=PlanConfig(max_tokens_per_gpu=64, global_batch_size=2),
        data=DataConfig(path=str(path), **data),
        objective=ObjectiveConfig(**objective),
    )


def test_pairs_and_objectives_must_fit(tmp_path: Path) -> None:
    assert len(open_dataset(config(tmp_path, [PAIR, PAIR], PAIRS))) == 4
    with pytest.raises(
        DataError, match=r"data.jsonl: 1 of 3 samples \(the first is of line 2\) are"
    ):
        open_dataset(config(tmp_path, [PAIR, PLAIN], PAIRS))
    with pytest.raises(DataError, match=r"4 of 4 samples .*\.kind=sft does not read; set dpo"):
        open_dataset(config(tmp_path, [PAIR, PAIR], {"kind": "sft"}))


def test_filtered_groups_are_in_no_batch_and_no_count_of_steps(tmp_path: Path) -> None:
    rows = [{**PLAIN, "group": k // 2, "reward": k % 2 * (k // 2 % 2)} for k in range(16)]
    # Groups 1, 3, 5 and 7 have rewards 0 and 1; the others have equal ones.
    filtered = config(tmp_path, rows, {}, drop_equal_rewards=True, prompts_per_batch=3)
    data = open_dataset(filtered)
    batches = [batch for _, _, batch in all_batches(filtered, data)]
    assert [len(batch) for batch in batches] == [6, 2]
    assert [steps_in(filtered, data, batch) for batch in batches] == [3, 1]
    assert data.num_dropped_groups == 4
    found = batch_advantages(filtered.objective, data, batches[0])
    assert found.tolist() == [-0.5, 0.5] * 3


def test_overlong_responses_have_lower_advantages(tmp_path: Path) -> None:
    lengths = [2, 6, 8, 12]
    rows = [
        {"prompt_ids": [1], "response_ids": [2] * n, "group": 0, "reward": 1.0} for n in lengths
    ]
    limits = {"max_response_tokens": 8, "overlong_buffer_tokens": 4, "overlong_penalty": 2.0}
    penalized = config(tmp_path, rows, {**limits, "advantage_norm": "none"})
    data = open_dataset(penalized)
    found = batch_advantages(penalized.objective, data, np.arange(4))
    assert found.tolist() == [1.0, 0.0, -1.0, -1.0]
