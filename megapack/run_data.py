"""The data of a run: its samples, and in which batches they come. What reads it needs no torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from megapack.data_index import ReadSettings
from megapack.dataset import Dataset, Rows
from megapack.generated import generate_rollouts
from megapack.train_config import TrainConfig


def open_dataset(config: TrainConfig) -> Dataset:
    """The file that the config names, or generated rollouts."""
    data = config.data
    if data.path is None:
        groups = data.num_generated // data.generated_group_size
        return Dataset.from_rollouts(
            generate_rollouts(groups, data.generated_group_size, data.generated_seed)
        )
    settings = ReadSettings(
        vocab_size=config.model.vocab_size,
        max_length=config.longest_sample,
        overlong=data.overlong,
    )
    return Dataset.from_files(data.path, settings, Path(config.runs_dir) / ".index")


def all_batches(config: TrainConfig, data: Dataset) -> Iterator[tuple[int, int, Rows]]:
    """Epoch, number in it, and rows of each batch of the run, one at a time."""
    every = (
        (epoch, index, batch)
        for epoch in range(config.train.epochs)
        for index, batch in enumerate(
            data.batches(
                config.data.prompts_per_batch,
                shuffle=config.data.shuffle,
                seed=config.seed,
                epoch=epoch,
            )
        )
    )
    return itertools.islice(every, config.train.num_batches)


def steps_in(config: TrainConfig, data: Dataset, rows: Rows) -> int:
    """Optimizer steps that a batch becomes."""
    if config.plan.num_steps is not None:
        return config.plan.num_steps
    if config.plan.global_batch_size is None:
        return 1
    return -(-data.num_rollouts(rows) // config.plan.global_batch_size)
