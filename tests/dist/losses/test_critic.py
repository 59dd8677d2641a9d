"""PPO with a critic in the main job: exact, and resumed bit by bit."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.spawn import ROOT, checked_job, run_job
from tests.hf_models import make_folder
from tests.metric_names import documented

pytestmark = pytest.mark.dist

CONFIG = ROOT / "configs" / "ppo_critic_tiny_dp2_cpu.yaml"
# Two batches of two steps: the checkpoint after 3 steps is inside a batch.
TINY = ["name=run", "data.num_generated=64", "data.prompts_per_batch=32"]
TINY += ["plan.global_batch_size=16", "train.save_interval=3", "train.keep_checkpoints=null"]
TINY += ["train.entropy_interval=1", "objective.kl_in_reward_coef=0.05", "optim.lr=0.003"]
TIMES = ("_s", "_per_second", "_per_gpu")


def job(folder: Path, *overrides: str) -> tuple[int, str]:
    """Exit code and output of the main job in `folder`."""
    args = ["train", str(CONFIG), *TINY, *overrides]
    done = run_job(2, "megapack", args, timeout_s=200, cwd=folder)
    return done.returncode, done.stdout


def finished(folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """The metrics of a job that must succeed, without times."""
    code, output = job(folder, *overrides)
    assert code == 0, output[-6000:]
    lines = (folder / "runs/run/metrics.jsonl").read_text().splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if not name.endswith(TIMES)}
        for line in lines
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("whole")
    return folder, finished(folder)


def copy_until_step_3(folder: Path, to: Path) -> None:
    shutil.copytree(folder / "runs/run", to / "runs/run")
    shutil.rmtree(to / "runs/run/checkpoints/step-00000004")


def test_policy_and_critic_learn(whole: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, lines = whole
    assert len(lines) == 4
    raw = json.loads((folder / "runs/run/metrics.jsonl").read_text().splitlines()[0])
    assert set(raw) == documented("Every run", "Policy losses", "A critic")
    assert all(line["updated"] == line["critic_updated"] == 1 for line in lines)
    # The first step of a batch is on policy, and whitened advantages have mean 0 over its tokens.
    assert lines[0]["ratio"] == pytest.approx(1, abs=1e-6)
    assert lines[0]["critic_lr"] == 1e-3
    assert lines[-1]["critic_loss"] < lines[0]["critic_loss"]


def test_resumed_inside_a_batch_bit_by_bit(
    whole: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    folder, lines = whole
    copy_until_step_3(folder, tmp_path)
    assert finished(tmp_path, "train.resume=auto") == lines


@pytest.mark.weekly
def test_a_bf16_critic_with_its_fp32_head_is_resumed_bit_by_bit(tmp_path: Path) -> None:
    """The head and some bf16 weights are in one group of the distributed optimizer."""
    lines = finished(tmp_path, "model.dtype=bf16")
    copy_until_step_3(tmp_path, tmp_path / "other")
    assert finished(tmp_path / "other", "model.dtype=bf16", "train.resume=auto") == lines


@pytest.mark.weekly
def test_resumed_on_two_stages(whole: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    """The policy's embedding is tied, so the last stage has a copy; the critic's is not."""
    folder, lines = whole
    copy_until_step_3(folder, tmp_path)
    found = finished(tmp_path, "layout.dp=1", "layout.pp=2", "train.resume=auto")
    names = [name for name in lines[0] if name.startswith("critic_")]
    for one, other in zip(found, lines, strict=True):
        for name in ("loss", "grad_norm", *names):
            assert one[name] == pytest.approx(other[name], rel=2e-5, abs=1e-6), name


@pytest.mark.weekly
def test_a_checkpoint_without_a_critic_is_refused(tmp_path: Path) -> None:
    without = ("critic.enabled=false", "objective.gae_lambda=1.0", "objective.kl_in_reward_coef=0")
    finished(tmp_path, *without)
    code, output = job(tmp_path, "train.resume=auto")
    assert code != 0
    assert "has no critic; set critic.enabled=false" in output


def write_rollouts(path: Path, *, shared: bool) -> None:
    """Random token ids and rewards; of every second response, a part is a tool's output.

    With `shared`, samples have one of two prompts.
    """
    rng = random.Random(0)
    prompts = [[rng.randrange(100) for _ in range(12)] for _ in range(2)]
    with open(path, "w", encoding="utf-8") as file:
        for number in range(12):
            row: dict[str, Any] = {
                "prompt_ids": [rng.randrange(100) for _ in range(rng.randrange(1, 9))],
                "response_ids": [rng.randrange(100) for _ in range(rng.randrange(2, 24))],
                "reward": rng.random(),
            }
            if shared:
                row["prompt_ids"] = prompts[number % 4 // 2]
            if number % 2:
                length = len(row["response_ids"])
                row["loss_mask"] = [int(t < length // 3 or t > length // 2) for t in range(length)]
                row["loss_mask"][0] = 1
            file.write(json.dumps(row) + "\n")


@pytest.mark.parametrize("share", [pytest.param("off", marks=pytest.mark.weekly), "auto"])
def test_values_advantages_and_steps_equal_one_sample_at_a_time(share: str, tmp_path: Path) -> None:
    write_rollouts(tmp_path / "rollouts.jsonl", shared=share == "auto")
    settings = [f"data.path={tmp_path / 'rollouts.jsonl'}", f"runs_dir={tmp_path / 'runs'}"]
    settings += ["data.prompts_per_batch=12", "plan.global_batch_size=6", "model.vocab_size=100"]
    settings += ["plan.max_tokens_per_gpu=48", "model.init_std=0.2", "objective.gamma=0.97"]
    if share == "auto":
        settings += ["plan.share_prefixes=auto", "plan.max_tokens_per_gpu=96"]
    settings += ["optim.distributed_optimizer=false", "optim.lr=0.003", "critic.lr=0.003"]
    out = tmp_path / "found.json"
    checked_job(
        2, "tests.dist.losses.critic_worker", [str(out), str(CONFIG), *settings], timeout_s=200
    )
    found = json.loads(out.read_text())
    lines = (tmp_path / "runs/ppo_critic_tiny_dp2_cpu/metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    for name in ("old_logprobs", "old_values", "advantages", "returns"):
        assert found[f"{name}_error"] < 1e-5, name
    for index in range(2):
        assert (steps[index]["shared_tokens"] > 0) == (share == "auto")
        for name, key in (("policy", "loss"), ("critic", "critic_loss")):
            expected = pytest.approx(found[f"{name}_loss_{index}"], rel=1e-5, abs=1e-6)
            assert steps[index][key] == expected, name
            assert found[f"{name}_gradient_error_{index}"] < 1e-5, name
    # The second step is off policy, and some values have moved further than the clip.
    assert steps[1]["clip_fraction"] > 0
    assert steps[1]["critic_value_clip_fraction"] > 0


def test_policy_reference_and_critic_from_folders_of_their_own(tmp_path: Path) -> None:
    """The critic is a smaller reward model, which a step trains alone before the policy."""
    folders = {
        "model.hf_path": make_folder(tmp_path / "policy", "qwen3_tied", vocab_size=100),
        "objective.reference_hf_path": make_folder(
            tmp_path / "reference", "qwen3_tied", vocab_size=100, seed=5
        ),
        "critic.hf_path": make_folder(tmp_path / "critic", "qwen3_score", vocab_size=100),
    }
    (tmp_path / "config.yaml").write_text(
        "name: folders\ndevice: cpu\nlayout: {dp: 2}\n"
        "plan: {max_tokens_per_gpu: 48, global_batch_size: 6}\n"
        "data: {prompts_per_batch: 12, max_length: 128, tokenizer: bytes}\n"
        "objective: {kind: ppo, gamma: 0.97, gae_lambda: 0.95, kl_in_reward_coef: 0.02}\n"
        "critic: {enabled: true, lr: 0.003, warmup_steps: 1}\n"
        "optim: {lr: 0.003, distributed_optimizer: false}\n"
    )
    rollouts = tmp_path / "rollouts.jsonl"
    write_rollouts(rollouts, shared=False)
    settings = [f"{key}={path}" for key, path in folders.items()]
    settings += [f"data.path={rollouts}", f"runs_dir={tmp_path / 'runs'}"]
    args = [str(tmp_path / "found.json"), str(tmp_path / "config.yaml"), *settings]
    checked_job(2, "tests.dist.losses.critic_worker", args, timeout_s=200)
    found = json.loads((tmp_path / "found.json").read_text())
    lines = (tmp_path / "runs/folders/metrics.jsonl").read_text().splitlines()
    first, second = (json.loads(line) for line in lines)
    for name in ("old_logprobs", "old_values", "advantages", "returns"):
        assert found[f"{name}_error"] < 1e-5, name
    assert (first["updated"], first["critic_updated"]) == (0, 1)
    assert "loss" not in first
    assert (second["updated"], second["critic_updated"]) == (1, 1)
    # The policy has not moved yet, and its learning rate begins here.
    assert second["ratio"] == pytest.approx(1, abs=1e-6)
    assert second["lr"] == 0.003
    for line, index, names in ((first, 0, ["critic"]), (second, 1, ["policy", "critic"])):
        for name in names:
            own = line["critic_loss" if name == "critic" else "loss"]
            assert own == pytest.approx(found[f"{name}_loss_{index}"], rel=1e-5, abs=1e-6)
            assert found[f"{name}_gradient_error_{index}"] < 1e-5, name
    _compare_with_transformers(found, folders, tmp_path)


def _compare_with_transformers(
    found: dict[str, Any], folders: dict[str, Path], folder: Path
) -> None:
    """Values of the folder's reward model, and log-probs of the reference, token by token."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    critic = AutoModelForSequenceClassification.from_pretrained(folders["critic.hf_path"])
    policy = AutoModelForCausalLM.from_pretrained(folders["objective.reference_hf_path"])
    rows = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    errors = {"old_values": 0.0, "ref_logprobs": 0.0}
    expected: dict[str, list[torch.Tensor]] = {name: [] for name in errors}
    with torch.no_grad():
        for row in rows:
            tokens = torch.tensor(row["prompt_ids"] + row["response_ids"])
            counts = row.get("loss_mask", [1] * len(row["response_ids"]))
            mask = torch.tensor([0] * len(row["prompt_ids"]) + counts).bool()[1:]
            hidden = critic.model(tokens[None]).last_hidden_state
            expected["old_values"].append(critic.score(hidden)[0, :-1, 0][mask])
            log_p = policy(tokens[None]).logits[0, :-1].float().log_softmax(-1)
            logprobs = log_p.gather(1, tokens[1:, None])[:, 0]
            expected["ref_logprobs"].append(logprobs[mask])
    for name, values in expected.items():
        # The batch may have them in another order.
        left = [torch.tensor(own) for own in found[name]]
        assert len(left) == len(values) == 12
        for value in values:
            near = [
                float((own - value).abs().max()) if len(own) == len(value) else 1e9 for own in left
            ]
            errors[name] = max(errors[name], min(near))
            left.pop(near.index(min(near)))
    assert max(errors.values()) < 1e-5
    assert max(float(value.abs().max()) for value in expected["old_values"]) > 0.1
