"""What the measuring parts of the check of several ranks predict and judge, without any rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megapack.job.config.sections import TrainConfig
from megapack.plan.check import check_plan
from tools.nccl import measured, race
from tools.nccl.session import Session

pytestmark = pytest.mark.unit

WAYS = [
    *("Megatron-LM (next_fit)", "slime (first_fit_flops)", "verl (kk_per_rank)"),
    *("megapack", "dynamic CP", "everything"),
]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    # Generated lengths, wherever this runs.
    monkeypatch.setenv("TRACES", str(tmp_path))
    session = Session(ranks=4, num_gpus=4, out=tmp_path, rehearsed=True, stall_s=60)
    return measured.read_config(measured.settings(session))


def lengths_of(config: TrainConfig, tokens: int) -> np.ndarray[Any, Any]:
    return np.array([sum(sample) for sample in measured.samples(config, tokens)])


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_way_of_every_layout_is_a_legal_plan_of_all_samples_with_a_prediction(
    config: TrainConfig, ranks: int, tmp_path: Path
) -> None:
    budget = config.plan.max_tokens_per_gpu
    assert budget is not None
    # The longest sample that the check may have.
    lengths = np.append(lengths_of(config, 512 * ranks), 2 * budget)
    for layout in race.layouts(ranks):
        assert layout.world_size == ranks
        cost = race.cost_of(config, layout, tmp_path / "no_file.yaml")
        ways = race.ways(config, lengths, layout, cost)
        assert list(ways) == [name for name in WAYS if name != "dynamic CP" or layout.dp > 1]
        weights = config.memory_model().stage(layout, 0, live_tokens=0, row_tokens=0)
        for way in ways.values():
            check_plan(way.plan, lengths.tolist())
            assert way.plan.steps[0].kept_samples == tuple(range(lengths.size))
            assert way.seconds > 0
            assert way.bytes > weights.parameters + weights.gradients
