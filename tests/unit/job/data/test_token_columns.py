"""Columns of values per response token: read, stored, cut, given to batches and refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megapack.cost.model import CostModel
from megapack.errors import DataError
from megapack.job.config.sections import DataConfig, ObjectiveConfig, PlanConfig, TrainConfig
from megapack.job.data.batches import batch_advantages, open_dataset
from megapack.job.data.dataset import Dataset
from megapack.job.data.generated import generate_rollouts
from megapack.job.data.token_blocks import ReadSettings
from megapack.job.train.passes import BatchPlanner
from megapack.layout import Layout
from megapack.plan.plan import own_samples

pytestmark = pytest.mark.unit

IDS: dict[str, Any] = {"prompt_ids": [1, 0], "response_ids": [0, 4, 5]}
ENGINE = {"rollout_logprobs": [-0.5, -1, -2.25]}
TOPK = {
    "teacher_topk_ids": [[1, 2], [3, 0], [5, 6]],
    "teacher_topk_logprobs": [[-0.5, -1.5], [-0.25, -3], [-1, -2]],
}


def read(path: Path, *rows: dict[str, Any], **settings: Any) -> Dataset:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Dataset.from_files(path, ReadSettings(**settings), path.parent)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_columns_are_stored_per_response_token(tmp_path: Path, suffix: str) -> None:
    short = {
        "prompt_ids": [7],
        "response_ids": [8],
        "rollout_logprobs": [-3.0],
        "teacher_topk_ids": [[9, 8]],
        "teacher_topk_logprobs": [[-0.125, -4.0]],
    }
    rows = [{**IDS, **ENGINE, **TOPK}, short]
    path = tmp_path / f"data.{suffix}"
    if suffix == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        opened = [Dataset.from_files(path, ReadSettings(), tmp_path) for _ in range(2)]
    else:
        opened = [read(path, *rows), Dataset.from_files(path, ReadSettings(), tmp_path)]
    # The second one is mapped from what the first one stored.
    for data in opened:
        assert data.token_columns == {*ENGINE, *TOPK}
        for number, row in enumerate(rows):
            for name in data.token_columns:
                assert data.token_column(name, number).tolist() == row[name]
    assert len(list(tmp_path.glob(".data*teacher_topk_ids.npy"))) == 1


def test_a_sample_that_is_cut_keeps_the_values_of_its_tokens(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    data = read(path, {**IDS, **TOPK}, max_length=4, overlong="truncate")
    assert data.token_column("teacher_topk_ids", 0).tolist() == [[1, 2], [3, 0]]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{**IDS, "rollout_logprobs": [-1.0]}], "1: rollout_logprobs is [-1.0] for 3 response_ids"),
        ([{**IDS, "rollout_logprobs": [[-1.0]] * 3}], "expected one number per response id"),
        ([{**IDS, "rollout_logprobs": ["a"] * 3}], "expected one number per response id"),
        ([{**IDS, "teacher_topk_ids": [[1], [2, 3], [4]]}], "teacher_topk_ids is ragged"),
        ([{**IDS, "teacher_topk_ids": [[]] * 3}], "expected one list of k numbers per response id"),
        ([{**IDS, "teacher_topk_ids": [[1.5]] * 3}], "expected one list of k numbers"),
        ([{**IDS, "teacher_topk_ids": [[1], [2], [999]]}], "has 999, outside the vocabulary"),
        ([{"prompt": "a", "response": "b", **ENGINE}], "give prompt_ids and response_ids with it"),
        ([{**IDS, **ENGINE}, IDS], "2: rollout_logprobs is given for some samples only"),
        ([IDS, {**IDS, **TOPK}], "2: teacher_topk_ids is given for some samples only"),
        (
            [{**IDS, **TOPK}, {**IDS, **TOPK, "teacher_topk_ids": [[1]] * 3}],
            "2: teacher_topk_ids has k=1, samples before it k=2",
        ),
    ],
)
def test_bad_columns_are_refused_with_their_line(
    tmp_path: Path, rows: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(DataError) as error:
        read(tmp_path / "data.jsonl", *rows)
    assert message in str(error.value)
    assert f"data.jsonl:{len(rows)}: " in str(error.value)


def test_a_batch_has_the_columns_of_the_samples_that_its_rank_packs() -> None:
    names = ("rollout_logprobs", "teacher_topk_ids")
    data = Dataset.from_rollouts(generate_rollouts(4, 2, seed=0, columns=names))
    assert data.token_columns == set(names)
    numbers = np.arange(8)
    config = PlanConfig(max_tokens_per_gpu=1024, share_prefixes="off")
    packed = set()
    for dp_rank in range(2):
        planner = BatchPlanner(
            config,
            Layout(dp=2),
            CostModel(per_token=1.0),
            data,
            dp_rank=dp_rank,
            token_columns=names,
        )
        batch = planner.plan(numbers, {})
        own = own_samples((batch.plan,), dp_rank)
        packed |= set(own)
        for i in range(8):
            ids = batch.samples.field("teacher_topk_ids", i)
            assert ids.dtype == torch.int64
            if i not in own:
                assert ids.dim() == 0
                continue
            stored = data.token_column("teacher_topk_ids", i)
            prompt = data.prompt_tokens(numbers[i : i + 1])[0]
            assert ids[prompt:].tolist() == stored.tolist()
            assert not ids[:prompt].any()
    assert packed == set(range(8))


def config(objective: dict[str, Any], path: Path | None = None) -> TrainConfig:
    return TrainConfig(
        name="run",
        plan=PlanConfig(max_tokens_per_gpu=1024),
        data=DataConfig(path=None if path is None else str(path), num_generated=8),
        objective=ObjectiveConfig(**objective),
        runs_dir=str(path.parent) if path is not None else "runs",
    )


def test_data_without_a_column_that_the_objective_reads_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    read(path, {**IDS, **TOPK, "reward": 1.0})
    open_dataset(config({"kind": "distill"}, path))
    for objective, name in (
        ({"correction": "truncate"}, "rollout_logprobs"),
        ({"teacher_kl_coef": 0.5}, "teacher_logprobs"),
    ):
        with pytest.raises(DataError, match=f"has no column {name}"):
            open_dataset(config(objective, path))
    generated = open_dataset(config({"correction": "mask", "teacher_kl_coef": 0.5}))
    assert generated.token_columns == {"rollout_logprobs", "teacher_logprobs"}


def test_without_rewards_a_teacher_alone_gives_advantages(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    teacher = {"teacher_logprobs": [-1.0] * 3}
    data = read(path, {**IDS, **teacher}, {**IDS, **teacher})
    numbers = np.arange(2)
    objective = ObjectiveConfig(teacher_kl_coef=0.5)
    assert batch_advantages(objective, data, numbers).tolist() == [0.0, 0.0]
    with pytest.raises(DataError):
        batch_advantages(dataclasses.replace(objective, teacher_kl_coef=0.0), data, numbers)
