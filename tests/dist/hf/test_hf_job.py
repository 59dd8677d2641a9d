"""The main job from a Hugging Face folder and back into one; `megapack export`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.spawn import run_job
from tests.hf_models import cached_folder, load
from tests.marks import needs_hybrid
from tests.unit.job.hf.tiny_llama import read_folder

pytestmark = pytest.mark.dist

# Two batches of two steps each.
CONFIG = """
name: run
device: cpu
plan: {max_tokens_per_gpu: 1024, global_batch_size: 8}
data: {num_generated: 32, prompts_per_batch: 4, max_length: 256, overlong: truncate}
objective: {kind: grpo, kl_coef: 0.1}
optim: {lr: 1.0e-3, distributed_optimizer: true}
train: {save_interval: 2, export_hf: last}
"""
PP2_TP2 = ("layout.tp=2", "layout.pp=2", "layout.sequence_parallel=true")


def job(folder: Path, command: str, *args: str, world: int) -> tuple[int, str]:
    """Exit code and output of a command in `folder`."""
    (folder / "config.yaml").write_text(CONFIG)
    done = run_job(world, "megapack", [command, *args], timeout_s=200, cwd=folder)
    return done.returncode, done.stdout


def train(folder: Path, *overrides: str, world: int = 4, family: str = "qwen3_tied") -> str:
    """The output of a run that must succeed."""
    model = f"model.hf_path={cached_folder(family)}"
    code, output = job(folder, "train", "config.yaml", model, *overrides, world=world)
    assert code == 0, output
    return output


def metrics(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "runs/run/metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A finished run's working folder and its output."""
    folder = tmp_path_factory.mktemp("run")
    return folder, train(folder, *PP2_TP2)


def test_a_run_starts_from_the_folder(trained: tuple[Path, str]) -> None:
    folder, output = trained
    assert f"loaded 46 tensors of {cached_folder('qwen3_tied')} in" in output
    lines = metrics(folder)
    assert len(lines) == 4
    # The reference is the folder's model, which the first step still is.
    assert lines[0]["kl_ref_nats"] == pytest.approx(0, abs=1e-6)
    assert lines[-1]["kl_ref_nats"] > 1e-4


def test_a_resumed_run_goes_on_from_its_checkpoint(
    trained: tuple[Path, str], tmp_path: Path
) -> None:
    folder, _ = trained
    checkpoint = folder / "runs/run/checkpoints/step-00000002"
    often = ("train.save_interval=1", "train.export_hf=checkpoints")
    output = train(tmp_path, *PP2_TP2, f"train.resume={checkpoint}", *often)
    assert "resumed after step 2" in output
    rest = metrics(tmp_path)
    names = ("loss", "grad_norm", "kl_ref_nats")
    assert [[line[n] for n in names] for line in rest] == [
        [line[n] for n in names] for line in metrics(folder)[2:]
    ]
    exports = tmp_path / "runs/run/hf"
    assert {path.name for path in exports.iterdir()} == {"step-00000003", "step-00000004"}
    found = read_folder(exports / "step-00000004")
    expected = read_folder(folder / "runs/run/hf/step-00000004")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_exports_of_a_run_and_of_its_checkpoint_are_the_same(
    trained: tuple[Path, str], tmp_path: Path
) -> None:
    folder, output = trained
    exported = folder / "runs/run/hf/step-00000004"
    assert [path.name for path in exported.parent.iterdir()] == [exported.name]
    assert "exported runs/run/hf/step-00000004: 46 tensors" in output
    expected = read_folder(exported)
    start = read_folder(cached_folder("qwen3_tied"))
    assert expected.keys() == start.keys()
    assert not any(torch.equal(expected[name], start[name]) for name in start)
    for world, options in ((1, ()), (2, ("--max-shard-bytes", "100000"))):
        out = tmp_path / f"out{world}"
        code, printed = job(folder, "export", "runs/run", "-o", str(out), *options, world=world)
        assert code == 0, printed
        assert f"{out}: 46 tensors" in printed
        found = read_folder(out)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    # transformers finds all weights in it, and the tokenizer beside them.
    state = load(tmp_path / "out1", "qwen3_tied").state_dict()
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        copied = (tmp_path / "out1" / name).read_bytes()
        assert copied == (cached_folder("qwen3_tied") / name).read_bytes()


@pytest.mark.weekly
def test_multi_token_prediction_is_trained_and_exported(tmp_path: Path) -> None:
    """By the run on two stages and from its checkpoint, with the copies of embedding and head."""
    short = ("data.num_generated=16", "train.save_interval=1", "model.mtp_num_layers=1")
    family = "glm4_moe_lite"
    train(tmp_path, *short, "layout.pp=2", world=2, family=family)
    assert all(line["mtp_1_loss"] > 0 for line in metrics(tmp_path))
    code, printed = job(tmp_path, "export", "runs/run", "-o", "out", world=1)
    assert code == 0, printed
    start = read_folder(cached_folder(family))
    found = read_folder(tmp_path / "out")
    expected = read_folder(next((tmp_path / "runs/run/hf").iterdir()))
    assert found.keys() == expected.keys() == start.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    depth = "model.layers.4."
    assert not torch.equal(found[f"{depth}eh_proj.weight"], start[f"{depth}eh_proj.weight"])
    for name, copied in (
        ("model.embed_tokens.weight", f"{depth}embed_tokens.weight"),
        ("lm_head.weight", f"{depth}shared_head.head.weight"),
    ):
        assert torch.equal(found[name], found[copied])
        assert not torch.equal(found[name], start[name])


@needs_hybrid
def test_a_hybrid_model_and_its_vision_part(tmp_path: Path) -> None:
    """Exports of a run on two stages and of its checkpoint on one are the same whole model."""
    short = ("data.num_generated=16", "objective.kl_coef=0", "train.save_interval=1")
    output = train(tmp_path, *short, "layout.pp=2", world=2, family="qwen3_5_moe")
    assert "loaded 72 tensors of" in output
    assert "21 tensors of the folder are not used" in output
    code, printed = job(tmp_path, "export", "runs/run", "-o", "out", world=1)
    assert code == 0, printed
    exported = next((tmp_path / "runs/run/hf").iterdir())
    found = read_folder(tmp_path / "out")
    expected = read_folder(exported)
    start = read_folder(cached_folder("qwen3_5_moe"))
    assert found.keys() == expected.keys() == start.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    unchanged = {name for name in start if torch.equal(found[name], start[name])}
    assert unchanged == {name for name in start if name.startswith("model.visual.")}
    state = load(exported, "qwen3_5_moe").state_dict()
    assert len(state) == 72


def test_what_cannot_be_exported_is_one_line(trained: tuple[Path, str], tmp_path: Path) -> None:
    folder, _ = trained
    checkpoint = folder / "runs/run/checkpoints/step-00000004"
    for source, options, message in (
        (folder / "runs/none", (), "is neither a checkpoint nor a run's folder with a complete"),
        (checkpoint, ("--like", str(tmp_path / "gone")), "is not here; give its place with --like"),
        (checkpoint, ("--like", str(cached_folder("llama"))), "lacks"),
        (checkpoint, ("--max-shard-bytes", "0"), "set 1 or more"),
    ):
        out = ("-o", str(tmp_path / "out"))
        code, printed = job(folder, "export", str(source), *out, *options, world=1)
        assert code == 2, printed
        (line,) = [one for one in printed.splitlines() if one.startswith("megapack: ")]
        assert message in line
        assert not (tmp_path / "out").exists()
    random = ("model.num_layers=2", "layout.dp=1", "train.export_hf=null", "objective.kl_coef=0")
    code, printed = job(tmp_path, "train", "config.yaml", *random, world=1)
    assert code == 0, printed
    code, printed = job(tmp_path, "export", "runs/run", "-o", "out", world=1)
    assert code == 2
    assert "is of a run from random weights (model.hf_path=null)" in printed


def test_a_reward_model_of_a_tied_folder_is_exported_and_goes_on(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    kind = ("objective.kind=reward", "objective.loss_weighting=seq-mean-token-mean")
    options = (*kind, "objective.kl_coef=0", "data.overlong=skip", "train.save_interval=null")
    output = train(tmp_path, *options, world=1)
    assert "exported runs/run/hf/step-00000004" in output
    exported = tmp_path / "runs/run/hf/step-00000004"
    model = AutoModelForSequenceClassification.from_pretrained(exported)
    assert model.config.num_labels == 1
    score = read_folder(exported)["score.weight"]
    assert torch.equal(model.score.weight.float(), score.float())
    assert score.abs().max() > 0
    code, output = job(
        tmp_path,
        "train",
        "config.yaml",
        f"model.hf_path={exported}",
        "name=more",
        *options,
        world=1,
    )
    assert code == 0, output
