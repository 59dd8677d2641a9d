"""Batches of a window exchange prompt groups until their work is about equal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megapack.job.config.sections import DataConfig, LayoutConfig, PlanConfig, TrainConfig
from megapack.job.data.batches import all_batches, open_dataset
from megapack.job.data.dataset import Dataset
from megapack.job.data.rollouts import group_batches

pytestmark = pytest.mark.unit


def drawn(num_samples: int, seed: int = 0) -> np.ndarray:
    """Lengths of a long tail."""
    lengths = np.random.default_rng(seed).lognormal(7, 1, num_samples)
    return np.clip(lengths, 1, 32768).astype(np.int64)


def batches_of(work: np.ndarray, size: int, window: int, **settings: Any) -> list[np.ndarray]:
    """Batches of samples that are prompt groups of their own."""
    return list(group_batches(np.arange(work.size), size, work=work, window=window, **settings))


def sums(work: np.ndarray, batches: list[np.ndarray]) -> np.ndarray:
    return np.array([work[batch].sum() for batch in batches])


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("size", "window"), [(1, 4), (2, 3), (8, 2), (8, 5), (32, 10**9)])
def test_each_sample_is_once_in_its_window(seed: int, size: int, window: int) -> None:
    work = drawn(size * 17 + size // 2, seed)
    settings: dict[str, Any] = {"shuffle": True, "seed": seed, "epoch": 1}
    before = batches_of(work, size, 1, **settings)
    after = batches_of(work, size, window, **settings)
    assert list(map(len, after)) == list(map(len, before))
    place = np.argsort(np.concatenate(before))
    num_full = 17
    # If half a batch is left it is the last one, which stays as it is.
    assert [b.tolist() for b in after[num_full:]] == [b.tolist() for b in before[num_full:]]
    for first in range(0, num_full, window):
        own = slice(first, min(first + window, num_full))
        old, new = np.array(before[own]), np.array(after[own])
        assert sorted(new.ravel()) == sorted(old.ravel())
        assert (np.diff(place[new], axis=1) > 0).all(), "samples of a batch are out of order"
        squares = [sum(int(w) ** 2 for w in work[each].sum(axis=1)) for each in (old, new)]
        assert squares[1] <= squares[0]


def test_the_work_of_batches_is_even() -> None:
    work = drawn(64 * 128)
    before = sums(work, batches_of(work, 128, 1, shuffle=True))
    assert before.std() > 0.08 * before.mean()
    found = {w: sums(work, batches_of(work, 128, w, shuffle=True)) for w in (4, 16, 64)}
    # Within a window all batches are even; the means of windows of w batches are not.
    for window, after in found.items():
        each = after.reshape(-1, window)
        assert np.ptp(each, axis=1).max() <= 0.001 * each.max()
    assert 0.02 * before.mean() < found[16].std() < 0.5 * before.std()
    assert found[64].std() < 0.001 * before.mean()


def test_another_numpy_gives_the_same_batches() -> None:
    work = (np.random.PCG64(0).random_raw(64) % 1000).astype(np.int64)
    found = batches_of(work, 4, 8, shuffle=True, seed=5)
    assert [batch.tolist() for batch in found[:2]] == [[7, 21, 52, 5], [4, 62, 11, 12]]


def config(tmp_path: Path, window: int, plan: dict[str, Any] | None = None) -> TrainConfig:
    plan = {"max_tokens_per_gpu": 1024, "global_batch_size": 16, **(plan or {})}
    return TrainConfig(
        name="run",
        runs_dir=str(tmp_path),
        plan=PlanConfig(**plan),
        data=DataConfig(
            num_generated=256, prompts_per_batch=4, shuffle=True, balance_window=window
        ),
    )


def run_of(config: TrainConfig, data: Dataset) -> list[tuple[int, int, list[int]]]:
    return [(epoch, index, batch.tolist()) for epoch, index, batch in all_batches(config, data)]


def test_batches_do_not_depend_on_what_may_change_on_resume(tmp_path: Path) -> None:
    first = config(tmp_path, 4)
    data = open_dataset(first)
    expected = run_of(first, data)
    assert expected != run_of(config(tmp_path, 1), data)
    assert expected == run_of(config(tmp_path, 4), data)
    cost = tmp_path / "cost.yaml"
    cost.write_text("per_token: 1.0e-6\nper_token_sq: 1.0e-6\n")
    others = [
        config(tmp_path, 4, {"cost_model": str(cost)}),
        config(tmp_path, 4, {"calibrate": "online"}),
        replace(first, layout=LayoutConfig(tp=2, pp=2)),
        replace(first, model=replace(first.model, recompute="full")),
    ]
    for other in others:
        assert run_of(other, data) == expected
    # Windows do not end where the run ends.
    short = replace(first, train=replace(first.train, num_batches=3))
    assert run_of(short, data) == expected[:3]
