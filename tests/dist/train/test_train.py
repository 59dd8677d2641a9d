"""The main job end to end: the output and files of `python -m megapack train`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megapack import Layout, Plan, check_plan, simulate
from megapack.config import load_config
from megapack.job.config.sections import TrainConfig
from megapack.job.view.records import read_run
from megapack.pipeline import Event
from tests.dist.spawn import ROOT, run_job
from tests.metric_names import documented

pytestmark = pytest.mark.dist

CONFIG = ROOT / "configs" / "gpt_tiny_dp2_pp2_vpp2_cpu.yaml"
TINY = ["data.num_generated=32", "data.prompts_per_batch=4", "plan.global_batch_size=8"]
TINY += ["train.entropy_interval=1"]
ONE = ("layout.dp=1", "layout.pp=1", "layout.vpp=1")
PP2_VPP2 = ["layout.dp=1", "layout.pp=2", "layout.vpp=2"]


def run(tmp_path: Path, *overrides: str, world: int = 2) -> tuple[int, str]:
    """Exit code and output of the main job in `tmp_path`."""
    args = ["train", str(CONFIG), "name=run", *overrides]
    done = run_job(world, "megapack", args, timeout_s=200, cwd=tmp_path)
    return done.returncode, done.stdout


def metrics(tmp_path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    text = (tmp_path / "runs/run/metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_grpo_on_generated_rollouts(tmp_path: Path) -> None:
    code, output = run(
        tmp_path, *TINY, *PP2_VPP2, "objective.entropy_coef=0.001", "train.trace_steps=1"
    )
    assert code == 0, output
    lines = metrics(tmp_path)
    assert len(lines) == 4
    assert f"4 steps; wrote {Path('runs/run')}" in output
    for line in lines:
        for key in ("loss", "grad_norm", "entropy_nats", "kl_old_nats", "kl_ref_nats"):
            assert math.isfinite(line[key])
        assert 0 < line["packing_efficiency"] <= 1
        assert line["padding_fraction"] == pytest.approx(1 - line["packing_efficiency"])
        assert line["imbalance"] >= 1
        assert line["tokens_per_second"] > 0
        assert line["step_measured_s"] > 0
        assert line["updated"] == 1
        assert set(line) == documented("Every run", "Policy losses", "A reference policy")
        seconds = line["step_measured_s"] + line["optimizer_s"]
        assert line["tokens_per_second"] == pytest.approx(line["tokens"] / seconds)
        assert line["tokens_per_second_per_gpu"] == pytest.approx(line["tokens_per_second"] / 2)
    # The first step of a batch is on policy: its log-probs equal the old ones.
    assert lines[0]["kl_old_nats"] == pytest.approx(0, abs=1e-6)
    assert lines[0]["step_predicted_s"] is None
    assert lines[1]["step_predicted_s"] > 0
    assert lines[-1]["kl_ref_nats"] > 0, "the policy did not move from the reference"
    check_trace(tmp_path / "runs/run")
    config = load_config(tmp_path / "runs/run/config.yaml", [], TrainConfig)
    assert (config.layout.dp, config.data.num_generated) == (1, 32)
    plan = Plan.from_json((tmp_path / "runs/run/plan.json").read_text())
    assert plan.layout == Layout(pp=2, vpp=2)
    assert lines[-1]["plan_digest"] == plan.digest()[:12]


def check_trace(folder: Path) -> None:
    """Megatron ran the second step in the planned order, one forward or backward at a time."""
    records = read_run(folder)
    (traced,) = records.traced
    assert traced.number == 2
    plan = traced.plan
    step = plan.steps[0]
    assert {event.microbatch for event in traced.events} == set(range(len(step.ranks[0])))
    assert order(traced.events) == order(simulate(step, layout=plan.layout).events)
    for stage in range(2):
        times = [
            time
            for event in sorted(traced.events, key=lambda event: event.start)
            if event.stage == stage
            for time in (event.start, event.end)
        ]
        assert times == sorted(times), "two forwards or backwards overlap"
        assert times[0] > 0
        assert times[-1] < records.metrics[1]["step_measured_s"] + 0.5
    assert records.lengths is not None
    check_plan(records.plan, records.lengths)


def order(events: Sequence[Event]) -> dict[int, list[tuple[str, int, int]]]:
    """The forwards and backwards of each stage, in order."""
    stages: dict[int, list[tuple[str, int, int]]] = {}
    for event in sorted(events, key=lambda event: event.start):
        stages.setdefault(event.stage, []).append((event.kind, event.chunk, event.microbatch))
    return stages


def test_sft_reduces_the_loss(tmp_path: Path) -> None:
    sft = ["objective.kind=sft", "objective.kl_coef=0", "train.epochs=3", "optim.lr=3e-3"]
    experts = ["model.num_experts=2", "model.moe_balance_loss_coef=0.01"]
    sft += [*experts, "model.moe_z_loss_coef=0.001", "model.mtp_num_layers=1"]
    sft += ["train.entropy_interval=5"]
    code, output = run(tmp_path, *TINY, *sft, "layout.dp=1", "layout.pp=1", "layout.vpp=1", world=1)
    assert code == 0, output
    losses = [line["loss"] for line in metrics(tmp_path)]
    assert losses[0] == pytest.approx(math.log(384), rel=0.1)
    assert losses[-1] < losses[0] - 0.5
    expected = documented("Every run", "Experts and multi-token prediction")
    for line in metrics(tmp_path):
        has_entropy = line["step"] in (1, 6, 11)
        assert set(line) == (expected if has_entropy else expected - {"entropy_nats"})


def test_real_rollouts(tmp_path: Path, shared_dir: Path) -> None:
    path = shared_dir / "rollouts" / "skythought_math500_128x4.jsonl"
    if not path.is_file():
        pytest.skip(f"{path.name} is absent")
    limits = ["data.max_length=1024", "data.overlong=truncate", "train.num_batches=1"]
    batch = [
        "data.prompts_per_batch=4",
        "plan.global_batch_size=16",
        "plan.max_tokens_per_gpu=2048",
    ]
    code, output = run(tmp_path, f"data.path={path}", *limits, *batch, *PP2_VPP2)
    assert code == 0, output
    (line,) = metrics(tmp_path)
    assert line["num_samples"] == 16
    assert line["grad_norm"] > 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((*ONE, "data.path=absent.jsonl"), "absent.jsonl"),
    ],
)
def test_bad_input_ends_with_one_line_and_code_2(
    tmp_path: Path, overrides: tuple[str, ...], message: str
) -> None:
    code, output = run(tmp_path, *overrides, world=1)
    assert code == 2, output
    (line,) = [line for line in output.splitlines() if line.startswith("megapack: ")]
    assert message in line
    assert "Traceback" not in output
