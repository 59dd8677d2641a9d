from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapack import ConfigError, patching
from megapack.hosts import xtuner
from megapack.hosts.xtuner import PackedIndices, plan_packs
from tests.hosts.rollouts import first_fit_count

pytestmark = pytest.mark.hosts

# What the patch needs of the host: packs are made from `_get_pack_infos`, and dealt out in turn.
CONTROLLER = """
import logging
import math

class TrainingController:
    def __init__(self, workers):
        self.workers = workers
        self.logger = logging.getLogger("stub")

    def _get_pack_infos(self, dataset, num_tokens, target, random=None):
        return [{"indices": [i], "longest": n} for i, n in enumerate(num_tokens)]

    def _packing(self, data_batches, pack_max_length, language_cfg):
        lengths = [data["seq_ctx"].input_ids.numel() for data in data_batches]
        infos = self._get_pack_infos(data_batches, lengths, pack_max_length)
        return [{"indices": info["indices"], "tokens": pack_max_length} for info in infos]

    def fit(self, data_batches, pack_max_length, rollout_idx):
        packs = self._packing(data_batches, pack_max_length, None)
        dp = len(self.workers) // self.workers[0].replicas
        assert len(packs) % dp == 0
        steps = self.workers[0]._optimizer_steps
        size = math.ceil(len(packs) // dp / steps)
        ranks = [packs[rank::dp] for rank in range(dp)]
        return [[rank[i : i + size] for i in range(0, len(rank), size)] for rank in ranks]
"""


class Worker:
    """A Ray actor's handle: calls return what `ray.get` is given."""

    def __init__(self, steps: int, replicas: int) -> None:
        self._optimizer_steps = steps
        self.replicas = replicas
        self.get_data_replicate_size = types.SimpleNamespace(remote=lambda: replicas)
        self.__ray_call__ = types.SimpleNamespace(remote=lambda function: function(self))


Fit = Callable[..., list[list[list[dict[str, Any]]]]]


@pytest.fixture
def fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fit]:
    """Steps of each replica: `fit(lengths, dp=, steps=)[dp][step][pack]`."""
    folder = tmp_path / "xtuner" / "v1" / "rl" / "trainer"
    folder.mkdir(parents=True)
    (folder / "controller.py").write_text(CONTROLLER)
    monkeypatch.syspath_prepend(str(tmp_path))
    ray = types.ModuleType("ray")
    ray.get = lambda values: values  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)

    def run(lengths: list[int], *, dp: int = 1, steps: int = 1, replicas: int = 1) -> Any:
        module = importlib.import_module("xtuner.v1.rl.trainer.controller")
        controller = module.TrainingController([Worker(steps, replicas)] * dp * replicas)
        samples = [
            {"seq_ctx": types.SimpleNamespace(input_ids=np.empty((1, length)))}
            for length in lengths
        ]
        for sample in samples:
            ids = sample["seq_ctx"].input_ids
            sample["seq_ctx"].input_ids = types.SimpleNamespace(numel=lambda size=ids.size: size)
        return controller.fit(samples, 1000, 0)

    patching.apply("xtuner")
    yield run
    patching.revert("xtuner")
    for name in [name for name in sys.modules if name.partition(".")[0] == "xtuner"]:
        del sys.modules[name]


def indices(packs: list[dict[str, Any]]) -> list[int]:
    return sorted(i for pack in packs for i in pack["indices"])


@pytest.mark.parametrize("dp", [1, 2])
def test_the_controller_makes_all_steps_of_44_packs(fit: Fit, dp: int) -> None:
    ranks = fit([1000] * 44 * dp, dp=dp, steps=16)
    assert [len(rank) for rank in ranks] == [16] * dp
    assert {len(step) for rank in ranks for step in rank} == {3}
    assert indices([p for rank in ranks for step in rank for p in step]) == list(range(44 * dp))
    padding = [p for rank in ranks for step in rank for p in step if not p["indices"]]
    assert [p["tokens"] for p in padding] == [128] * 4 * dp
    assert all(indices(step) for rank in ranks for step in rank)


def test_without_the_patch_the_same_packs_make_15_steps(fit: Fit) -> None:
    patching.revert("xtuner")
    (rank,) = fit([1000] * 44, steps=16)
    assert [len(step) for step in rank] == [3] * 14 + [2]


def test_replicas_get_even_tokens_and_run_similar_packs_together(fit: Fit) -> None:
    lengths = [900, 100, 880, 130, 400, 350, 300, 260, 640, 700, 210, 500]
    xtuner.configure(pack_multiple=1)
    ranks = fit(lengths, dp=2, steps=2, replicas=2)
    tokens = [sum(p["tokens"] for step in rank for p in step) for rank in ranks]
    assert sum(tokens) == sum(lengths)
    assert abs(tokens[0] - tokens[1]) < 200
    for steps in zip(*ranks, strict=True):
        for step in steps:
            sizes = [p["tokens"] for p in step]
            assert sizes == sorted(sizes, reverse=True)


def test_packs_are_padded_to_the_multiple_but_not_over_the_length(fit: Fit) -> None:
    assert fit([10, 20])[0][0][0]["tokens"] == 1000
    xtuner.configure(pack_multiple=64)
    assert fit([10, 20])[0][0][0]["tokens"] == 64
    assert fit([999])[0][0][0]["tokens"] == 1000


def test_fewer_samples_than_steps_make_fewer_steps(
    fit: Fit, caplog: pytest.LogCaptureFixture
) -> None:
    (rank,) = fit([10, 20, 30], steps=4)
    assert sorted(map(indices, rank)) == [[0], [1], [2]]
    assert "3 samples are too few for optimizer_steps=4" in caplog.text


def test_a_sample_over_the_length_is_refused_by_the_controller(fit: Fit) -> None:
    with pytest.raises(ValueError, match="sample 1 of 1001 tokens exceeds pack_max_length=1000"):
        fit([5, 1001])


@pytest.mark.parametrize("change", [{"pack_strategy": "best"}, {"pack_multiple": 0}])
def test_options_are_checked(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        xtuner.configure(**change)


def checked(
    lengths: list[int], *, pack_max_length: int, dp: int, steps: int, pack_strategy: str = "balance"
) -> PackedIndices:
    packs = plan_packs(lengths, pack_max_length, dp, steps, pack_strategy)
    assert [len(rank) for rank in packs] == [steps] * dp
    counts = [[len(step) for step in rank] for rank in packs]
    assert all(rank == counts[0] for rank in counts)
    flat = [pack for rank in packs for step in rank for pack in step]
    assert sorted(i for pack in flat for i in pack) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in pack) <= pack_max_length for pack in flat)
    return packs


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 64), min_size=4, max_size=60),
    dp=st.sampled_from([1, 2, 4]),
    steps=st.integers(1, 4),
    strategy=st.sampled_from(["balance", "native"]),
)
def test_packs_of_any_lengths(lengths: list[int], dp: int, steps: int, strategy: str) -> None:
    packs = checked(lengths, pack_max_length=64, dp=dp, steps=steps, pack_strategy=strategy)
    for step in range(steps):
        samples = [lengths[i] for rank in packs for pack in rank[step] for i in pack]
        fewest = first_fit_count(sorted(samples, reverse=True), 64)
        assert len(packs[0][step]) == -(-fewest // dp)
    if strategy == "balance":
        tokens = [
            sum(lengths[i] for rank in packs for pack in rank[step] for i in pack)
            for step in range(steps)
        ]
        assert max(tokens) - min(tokens) <= max(lengths)
