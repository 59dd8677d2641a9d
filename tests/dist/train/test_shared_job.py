"""The main job with `plan.share_prefixes=auto` takes the steps that it takes without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megapack import Plan, check_plan
from megapack.job.view.records import read_run
from tests.dist.spawn import ROOT, run_job

pytestmark = pytest.mark.dist

CONFIGS = ROOT / "configs"
# Batches of two steps each; the second one is packed while the first one runs.
TINY = ["name=run", "train.entropy_interval=1", "data.max_length=700", "data.overlong=skip"]
GRPO = [
    *("gpt_tiny_dp2_pp2_vpp2_cpu", "layout.dp=1", "data.num_generated=64"),
    *("data.prompts_per_batch=4", "plan.global_batch_size=8"),
]
JOBS = {
    "grpo_with_a_reference_on_pp2_vpp2": GRPO,
    "dpo_pairs": [
        *("dpo_tiny_cpu", "layout.dp=2", "data.num_generated=64", "plan.global_batch_size=16"),
        "train.entropy_interval=0",
    ],
    # Each depth of multi-token prediction keeps one more common token in each sample.
    "sft_with_experts_and_multi_token_prediction": [
        *("moe_replay_tiny_dp2_ep2_cpu", "train.routing_replay=none", "objective.kind=sft"),
        *("objective.advantage_norm=group", "data.num_generated=64", "model.mtp_num_layers=1"),
        *("model.moe_balance_loss_coef=0.01", "model.moe_z_loss_coef=0.001"),
    ],
}
# Values of the clock, and those that tell how rows are packed.
OTHERWISE = ("_s", "_per_second", "_per_gpu", "plan_digest", "shared_tokens", "imbalance")
OTHERWISE += ("bubble_fraction", "packing_efficiency", "padding_fraction", "microbatches")
OTHERWISE += ("num_microbatches_per_rank", "shared_tokens_fraction", "fill")


def steps(folder: Path, settings: list[str], *overrides: str) -> list[dict[str, Any]]:
    """The metrics of a job that must succeed."""
    config, *rest = settings
    args = ["train", str(CONFIGS / f"{config}.yaml"), *TINY, *rest, *overrides]
    folder.mkdir(exist_ok=True)
    done = run_job(2, "megapack", args, timeout_s=200, cwd=folder)
    assert done.returncode == 0, done.stdout[-6000:]
    has_line = any(", shared prefixes: " in line for line in done.stdout.splitlines())
    assert has_line == ("plan.share_prefixes=auto" in overrides)
    lines = (folder / "runs/run/metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


# tests/dist/rows shares prefixes of pairs.
WEEKLY_CASES = {"dpo_pairs"}


@pytest.mark.parametrize("name", JOBS)
def test_losses_and_gradients_are_those_without_sharing(name: str, tmp_path: Path) -> None:
    apart = steps(tmp_path / "off", JOBS[name], "plan.share_prefixes=off")
    shared = steps(tmp_path / "auto", JOBS[name], "plan.share_prefixes=auto")
    assert len(apart) == len(shared) >= 4
    assert all(line["shared_tokens"] == 0 for line in apart)
    assert all(0 < line["shared_tokens"] < line["tokens"] for line in shared)
    for one, other in zip(shared, apart, strict=True):
        for key in [key for key in other if not key.endswith(OTHERWISE)]:
            # Sums of fp32 in another order differ by 1e-7 of their largest terms. Losses and
            # metrics are means of terms of about 1, and Adam keeps the difference small for a few
            # steps: the margins of pairs differ by 1.2e-6 in the fifth.
            assert one[key] == pytest.approx(other[key], rel=4e-6, abs=2e-6), (one["step"], key)
    folder = tmp_path / "auto/runs/run"
    plan = Plan.from_json((folder / "plan.json").read_text())
    assert plan.prefixes is not None
    assert plan.prefixes.own_tokens == (2 if "multi_token" in name else 1)
    assert sum(line["shared_tokens"] for line in shared[-len(plan.steps) :]) == (
        plan.counts.shared_tokens
    )
    lengths = read_run(folder).lengths
    assert lengths is not None
    check_plan(plan, lengths)
