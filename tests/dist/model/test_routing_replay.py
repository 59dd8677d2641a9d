"""Routing replay in the main job: exact, and resumed bit by bit."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.dist.spawn import ROOT, checked_job, run_job

pytestmark = pytest.mark.dist

CONFIG = ROOT / "configs" / "moe_replay_tiny_dp2_ep2_cpu.yaml"
NUM_EXPERTS = 4
NUM_LAYERS = 2


def write_rollouts(path: Path, *, routed: bool, shared: bool = False) -> None:
    """Random token ids, rewards and experts; of every second sample the last token has none.

    Args:
        shared: the samples of a group have one prompt, and for 9 of its 12 tokens equal experts.
    """
    rng = random.Random(0)

    def experts(length: int) -> list[list[list[int]]]:
        return [
            [rng.sample(range(NUM_EXPERTS), 2) for _ in range(NUM_LAYERS)] for _ in range(length)
        ]

    prompts = [[rng.randrange(100) for _ in range(12)] for _ in range(3)]
    of_prompts = [experts(9) for _ in range(3)]
    with open(path, "w", encoding="utf-8") as file:
        for number in range(12):
            row: dict[str, Any] = {
                "group": number // 4,
                "prompt_ids": [rng.randrange(100) for _ in range(rng.randrange(1, 9))],
                "response_ids": [rng.randrange(100) for _ in range(rng.randrange(2, 24))],
                "reward": rng.random(),
            }
            if shared:
                row["prompt_ids"] = prompts[number // 4]
            length = len(row["prompt_ids"]) + len(row["response_ids"]) - number % 2
            if routed:
                row["routed_experts"] = experts(length)
            if routed and shared:
                row["routed_experts"][:9] = of_prompts[number // 4]
            file.write(json.dumps(row) + "\n")


def compared(
    tmp_path: Path, mode: str, *, shared: bool
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the worker found, and the metrics of the job's two steps."""
    write_rollouts(tmp_path / "rollouts.jsonl", routed=mode == "rollout", shared=shared)
    settings = [f"data.path={tmp_path / 'rollouts.jsonl'}", f"runs_dir={tmp_path / 'runs'}"]
    settings += ["data.prompts_per_batch=3", "plan.global_batch_size=6", "model.vocab_size=100"]
    settings += ["plan.max_tokens_per_gpu=48", "model.init_std=0.2", "layout.ep=1"]
    # Large enough that free routers choose other experts in the second step.
    settings += ["optim.distributed_optimizer=false", "optim.lr=0.03"]
    settings += [f"train.routing_replay={mode}", "objective.advantage_norm=group"]
    settings += [f"plan.share_prefixes={'auto' if shared else 'off'}"]
    out = tmp_path / "found.json"
    checked_job(
        2, "tests.dist.model.replay_worker", [str(out), str(CONFIG), *settings], timeout_s=200
    )
    lines = (tmp_path / "runs/moe_replay_tiny_dp2_ep2_cpu/metrics.jsonl").read_text().splitlines()
    return json.loads(out.read_text()), [json.loads(line) for line in lines]


@pytest.mark.parametrize(("shared", "mode"), [(False, "old_logprobs"), (True, "rollout")])
def test_steps_equal_one_sample_at_a_time_with_the_same_experts(
    shared: bool, mode: str, tmp_path: Path
) -> None:
    found, steps = compared(tmp_path, mode, shared=shared)
    assert (found["shared_tokens"] > 10) == shared
    assert found["is_scattered"], "each rank holds only the routes of its own samples"
    # The largest of a whole batch: below 1e-5 on one CPU, 1.4e-5 on another.
    assert found["old_logprobs_error"] < 3e-5
    # The ratios of the first step are 1, bit by bit.
    assert steps[0]["kl_old_nats"] == 0
    for index in range(2):
        assert steps[index]["loss"] == pytest.approx(found[f"loss_{index}"], rel=1e-5, abs=1e-6)
        assert found[f"gradient_error_{index}"] < 1e-5
    # The pass recorded the routers' own experts; an engine's are others, here random ones.
    if mode == "old_logprobs":
        assert found["changed_0"] == 0
    else:
        assert found["changed_0"] > 0.5
    assert found["changed_1"] > 0.01, "the second step would have chosen these experts anyway"


def test_checkpoints_are_at_the_ends_of_batches(tmp_path: Path) -> None:
    """Experts are recorded with the weights at the batch's start, which are gone on resume."""
    settings = ["name=run", "data.num_generated=64", "plan.global_batch_size=16"]
    settings += ["train.save_interval=1", "train.keep_checkpoints=null", "optim.lr=0.03"]
    settings += ["model.init_std=0.2", "data.prompts_per_batch=8"]
    whole = finished(tmp_path, *settings)
    assert len(whole) == 4
    checkpoints = tmp_path / "runs/run/checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-00000002", "step-00000004"]
    shutil.rmtree(checkpoints / "step-00000004")
    assert finished(tmp_path, *settings, "train.resume=auto") == whole
    # The last checkpoint of a run without replay is inside of a batch.
    shutil.rmtree(tmp_path / "runs")
    finished(tmp_path, *settings, "train.routing_replay=none")
    shutil.rmtree(checkpoints / "step-00000004")
    args = ["train", str(CONFIG), *settings, "train.resume=auto"]
    done = run_job(2, "megapack", args, timeout_s=200, cwd=tmp_path)
    assert done.returncode != 0
    assert (
        "step-00000003 was saved inside a batch and has no recorded experts, which "
        'train.routing_replay="old_logprobs", was "none" needs; set that as it was, or resume'
    ) in done.stdout


def finished(folder: Path, *overrides: str, world: int = 2) -> list[dict[str, Any]]:
    """The metrics of a job that must succeed, without times."""
    args = ["train", str(CONFIG), *overrides]
    done = run_job(world, "megapack", args, timeout_s=200, cwd=folder)
    assert done.returncode == 0, done.stdout[-6000:]
    lines = (folder / "runs/run/metrics.jsonl").read_text().splitlines()
    times = ("_s", "_per_second", "_per_gpu")
    return [
        {name: value for name, value in json.loads(line).items() if not name.endswith(times)}
        for line in lines
    ]


def test_a_rollout_without_routes_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    write_rollouts(path, routed=True)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    del rows[4]["routed_experts"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = ["train", str(CONFIG), "data.path=rollouts.jsonl", "train.routing_replay=rollout"]
    args += ["data.prompts_per_batch=3", "plan.global_batch_size=6"]
    done = run_job(2, "megapack", args, timeout_s=100, cwd=tmp_path)
    assert done.returncode != 0
    assert "file 1, line 5: the sample has no `routed_experts`" in done.stdout
