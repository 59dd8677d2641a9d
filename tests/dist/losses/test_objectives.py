"""The main job on files equals a plain loop: DPO, a reward model, DAPO with RLOO, importance
correction with a teacher, and distillation."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from megapack.config import dump_yaml
from megapack.job.config.sections import DataConfig, OptimConfig, PlanConfig, TrainConfig
from tests.dist import problem
from tests.dist.losses.objectives_loop import ADAM_EPS, CASES, LR, NUM_BATCHES, Case
from tests.dist.spawn import checked_job
from tests.metric_names import documented

pytestmark = pytest.mark.dist

SECTIONS = {
    "dpo": ["Preference pairs"],
    "reward": ["Preference pairs"],
    "dapo": ["Policy losses"],
    "tis": ["Policy losses", "Importance correction", "On-policy distillation"],
    "distill": ["Distillation"],
}
"""Sections of docs/metrics.md of each case."""


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, float]]]:
    path = tmp_path_factory.mktemp("loop") / "steps.json"
    checked_job(1, "tests.dist.losses.objectives_loop", [str(path)], timeout_s=200)
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def run(case: Case, folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """The metrics of the main job's steps."""
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in case.rows()))
    model = problem.shallow(problem.OTHER_MODEL if case.value_head else problem.MODEL)
    config = TrainConfig(
        name="run",
        device="cpu",
        seed=problem.SEED,
        runs_dir=str(folder),
        plan=PlanConfig(max_tokens_per_gpu=32),
        model=dataclasses.replace(model, vocab_size=problem.VOCAB_SIZE),
        data=DataConfig(path=str(data)),
        optim=OptimConfig(lr=LR, weight_decay=0.0, adam_eps=ADAM_EPS, clip_grad=1e3),
    )
    path = folder / "config.yaml"
    path.write_text(dump_yaml(config))
    layout = [f"layout.{name}={getattr(case.layout, name)}" for name in ("dp", "pp")]
    args = ["train", str(path), *layout, *case.overrides, *overrides]
    checked_job(case.layout.world_size, "megapack", args, timeout_s=200)
    return [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]


# tests/dist/rows has the rewards of pairs; the rollouts of "tis" are those of "dapo".
WEEKLY_CASES = {"reward", "dapo"}


@pytest.mark.parametrize("name", CASES)
def test_each_step_equals_the_plain_loop(
    name: str, expected: dict[str, list[dict[str, float]]], tmp_path: Path
) -> None:
    steps = run(CASES[name], tmp_path)
    assert len(steps) == len(expected[name]) == 2 * NUM_BATCHES
    for step, own in zip(steps, expected[name], strict=True):
        assert step["grad_norm"] > 1e-2
        for key, value in own.items():
            assert step[key] == pytest.approx(value, rel=2e-4, abs=1e-6), (step["step"], key)
    assert any(step["num_microbatches_per_rank"] > 1 for step in steps)
    if name == "dapo":
        assert steps[0]["num_dropped_groups"] == 4
    assert documented(*SECTIONS[name]) <= set(steps[0])
    if name == "tis":
        assert any(0.05 < step["engine_clip_fraction"] < 0.95 for step in steps)
