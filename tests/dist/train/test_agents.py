"""Agents' rollouts: turns that begin with each other, compaction, rollouts of 1 to 5 samples.

The same steps are taken one unpadded sample at a time, on one process.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.spawn import ROOT, run_job
from tests.dist.train.agents_worker import load_example
from tests.shown_outputs import difference, shown_outputs

pytestmark = pytest.mark.dist

ALONE = {"layout": {}, "share": False, "micro_batch_size": 1}
WAYS: dict[str, dict[str, Any]] = {
    "shared": {"layout": {"dp": 2, "pp": 2}, "max_tokens_per_gpu": 512},
    "in_pieces": {
        "layout": {"dp": 2, "pp": 2},
        "max_tokens_per_gpu": 96,
        "policy": {"split_samples": "auto", "backward": "split", "oversize": "alone"},
    },
}


def example(folder: Path, settings: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Weights and norms of the example's steps, and what it prints."""
    world = settings["layout"].get("dp", 1) * settings["layout"].get("pp", 1)
    args = [str(folder / "out.pt"), json.dumps(settings)]
    done = run_job(world, "tests.dist.train.agents_worker", args, timeout_s=300, cwd=folder)
    assert done.returncode == 0, done.stdout[-6000:]
    return torch.load(folder / "out.pt"), done.stdout


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One sample at a time."""
    return example(tmp_path_factory.mktemp("alone"), ALONE)[0]


@pytest.mark.parametrize("way", WAYS)
def test_weights_of_the_example_are_those_of_one_sample_at_a_time(
    way: str, alone: dict[str, Any], tmp_path: Path
) -> None:
    found, output = example(tmp_path, WAYS[way])
    assert len(found["norms"]) == 3
    assert found["norms"] == pytest.approx(alone["norms"], rel=1e-4)
    assert found["last"].keys() == alone["last"].keys()
    moved = apart = 0.0
    for name, weight in alone["last"].items():
        assert torch.equal(alone["first"][name], found["first"][name])
        moved += float((weight - alone["first"][name]).double().square().sum())
        apart += float((weight - found["last"][name]).double().square().sum())
    assert moved > 1e-3
    assert apart < 1e-6 * moved
    rollouts = re.findall(r"(\d+) rollouts, (\d+) turns: rows hold (\d+) of (\d+)", output)
    assert [int(step[0]) for step in rollouts] == [8, 8, 4]
    assert all(int(held) < int(tokens) / 1.5 for *_, held, tokens in rollouts)
    if way == "shared":
        (shown,) = shown_outputs("docs/agents.md")
        printed = [line for line in output.splitlines() if " turns: rows hold " in line]
        assert difference(shown.output, "\n".join(printed)) is None
    assert (found["pieces"] > 0) == (way == "in_pieces")


def write_rollouts(path: Path) -> int:
    """A line for each turn of 16 rollouts; the number of lines."""
    made = load_example().rollout
    rng = random.Random(1)
    lines = []
    for group in range(4):
        task = [rng.randrange(1, 256) for _ in range(40)]
        for number in range(4):
            reward = rng.random()
            for context, response in made(task, rng):
                row = {"group": group, "rollout": number, "reward": reward}
                lines.append({**row, "prompt_ids": context, "response_ids": response})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return len(lines)


def test_steps_of_the_main_job_are_those_of_one_sample_at_a_time(tmp_path: Path) -> None:
    num_turns = write_rollouts(tmp_path / "rollouts.jsonl")
    common = [
        *("train", str(ROOT / "configs/gpt_tiny_dp2_pp2_vpp2_cpu.yaml"), "layout.vpp=1"),
        *(f"data.path={tmp_path / 'rollouts.jsonl'}", "data.prompts_per_batch=4"),
        *("plan.global_batch_size=4", "objective.loss_weighting=rollout-mean"),
        *("objective.advantage_norm=group-std", "objective.entropy_coef=0.01"),
    ]
    ways = {
        "alone": ("layout.dp=1", "layout.pp=1", "plan.micro_batch_size=1"),
        "shared": ("layout.dp=2", "layout.pp=2", "plan.max_tokens_per_gpu=512"),
    }
    lines = {}
    for way, own in ways.items():
        world = 1 if way == "alone" else 4
        of_alone = ("plan.max_tokens_per_gpu=null", "plan.share_prefixes=off")
        args = [*common, f"name={way}", *own, *(of_alone if world == 1 else ())]
        done = run_job(world, "megapack", args, timeout_s=300, cwd=tmp_path)
        assert done.returncode == 0, done.stdout[-6000:]
        text = (tmp_path / f"runs/{way}/metrics.jsonl").read_text()
        lines[way] = [json.loads(line) for line in text.splitlines()]
    assert sum(line["num_samples"] for line in lines["shared"]) == num_turns
    assert len(lines["alone"]) == len(lines["shared"]) == 4
    for one, other in zip(lines["shared"], lines["alone"], strict=True):
        assert one["num_samples"] == other["num_samples"]
        assert one["num_rollouts"] == other["num_rollouts"] == 4
        assert 2 * one["shared_tokens"] > one["tokens"]
        for key in ("loss", "grad_norm", "ratio", "entropy_nats"):
            assert one[key] == pytest.approx(other[key], rel=2e-5, abs=2e-6), key
