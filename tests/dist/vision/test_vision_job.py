"""The main job on samples with images: resumed, exported, with a reference, a critic and pairs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megapack.config.cost_file import read_cost
from megapack.job.data.toy_images import write_images
from megapack.layout import Layout
from tests.dist.spawn import checked_job, run_code, run_job
from tests.toy_towers import write_image_model

pytestmark = pytest.mark.dist

# Two batches of two steps; the checkpoint after three steps is inside of the second.
SETTINGS = (
    *("name=run", "device=cpu", "model.hf_path=toy", "data.path=toy/rollouts.jsonl"),
    *("data.prompts_per_batch=4", "plan.global_batch_size=8", "plan.max_tokens_per_gpu=512"),
    *("plan.share_prefixes=auto", "train.epochs=1", "train.save_interval=3"),
    *("train.keep_checkpoints=null", "optim.lr=0.01", "train.resume=auto"),
)
GRPO = ("objective.kind=grpo", "objective.kl_coef=0.05")
DP2 = ("layout.dp=2",)
PP2_VPP2 = ("layout.dp=1", "layout.pp=2", "layout.vpp=2")
TP2 = ("layout.dp=1", "layout.tp=2", "layout.sequence_parallel=true")
TRAIN, FROZEN = "model.vision=train", "model.vision=frozen"
NUM_STEPS = 4


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy") / "toy"
    write_image_model(folder)
    write_images(folder)
    return folder


def args_of(folder: Path, *overrides: str) -> list[str]:
    config = folder / "config.yaml"
    config.write_text("{}\n")
    return ["train", str(config), *SETTINGS, *overrides]


def finished(toy: Path, folder: Path, *overrides: str, world: int = 2) -> list[dict[str, Any]]:
    """The metrics of a job that must succeed."""
    folder.mkdir(exist_ok=True)
    if not (folder / "toy").exists():
        (folder / "toy").symlink_to(toy)
    done = run_job(world, "megapack", args_of(folder, *overrides), timeout_s=240, cwd=folder)
    assert done.returncode == 0, done.stdout[-5000:]
    lines = (folder / "runs/run/metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def undisturbed(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    lines = finished(toy, folder, *GRPO, *DP2, TRAIN)
    assert len({line["loss"] for line in lines}) == NUM_STEPS
    return folder


def metrics(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "runs/run/metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights that an export of the run's last checkpoint has."""
    out = folder / "out"
    if not out.exists():
        args = ["export", str(folder / "runs/run"), "-o", str(out), "--like", str(folder / "toy")]
        checked_job(1, "megapack", args, timeout_s=120)
    return load_file(out / "model.safetensors")


@pytest.mark.parametrize(
    ("layout", "rel"),
    [
        pytest.param(DP2, 0.0, id="same"),
        pytest.param(PP2_VPP2, 1e-5, id="pp2_vpp2"),
        pytest.param(TP2, 1e-5, id="tp2_sp", marks=pytest.mark.weekly),
    ],
)
def test_resumed(
    toy: Path, undisturbed: Path, tmp_path: Path, layout: tuple[str, ...], rel: float
) -> None:
    folder = tmp_path / "again"
    shutil.copytree(undisturbed / "runs/run", folder / "runs/run")
    shutil.rmtree(folder / "runs/run/checkpoints/step-00000004")
    lines = finished(toy, folder, *GRPO, *layout, TRAIN)
    for one, other in zip(lines, metrics(undisturbed), strict=True):
        for key in ("loss", "grad_norm", "kl_ref_nats"):
            assert one[key] == pytest.approx(other[key], rel=rel, abs=rel), (one["step"], key)
    again, before = weights(folder), weights(undisturbed)
    start = load_file(toy / "model.safetensors")
    assert again.keys() == before.keys() == start.keys()
    for name, value in before.items():
        assert torch.allclose(again[name], value, rtol=0, atol=10 * rel), name
        assert not torch.equal(value, start[name]), f"{name} has not been trained"


def test_a_frozen_tower_stays_and_encodes_each_image_once(toy: Path, tmp_path: Path) -> None:
    folder = tmp_path / "frozen"
    folder.mkdir()
    (folder / "toy").symlink_to(toy)
    args = args_of(folder, *GRPO, FROZEN, "data.shuffle=false")
    code = f"""
import json, os
os.chdir({str(folder)!r})
from megapack.model.vision.tower import VisionTower
encoded = []
true = VisionTower.encode
def encode(self, refs, pixels):
    encoded.extend(ref.key for ref in refs)
    return true(self, refs, pixels)
VisionTower.encode = encode
from megapack.cli import main
assert main({args!r}) == 0
print(json.dumps({{"encoded": encoded}}))
"""
    encoded = run_code(code)["encoded"]
    # Old and reference log-probs, and two steps of each of two batches; no image is in both.
    assert len(encoded) == len(set(encoded)) > 8
    lines = metrics(folder)
    assert all(line["kl_ref_nats"] >= 0 for line in lines)
    got, start = weights(folder), load_file(toy / "model.safetensors")
    visual = [name for name in start if "visual" in name]
    assert visual
    for name in visual:
        assert torch.equal(got[name], start[name])


def test_a_critic_has_a_tower_of_its_own(toy: Path, tmp_path: Path) -> None:
    lines = finished(
        toy, tmp_path / "ppo", *DP2, TRAIN, "objective.kind=ppo", "critic.enabled=true"
    )
    assert len(lines) == NUM_STEPS
    assert all(line["critic_grad_norm"] > 0 for line in lines)


def test_preference_pairs_with_images(toy: Path, tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.mkdir()
    (path / "images").symlink_to(toy / "images")
    names = sorted(file.name for file in (toy / "images").iterdir())[:8]
    rows = []
    for name in names:
        image = {"type": "image", "image": f"images/{name}"}
        user = {"role": "user", "content": [image, {"type": "text", "text": "Which color?"}]}
        said = [{"role": "assistant", "content": text} for text in ("Red.", "No idea at all.")]
        rows.append({"chosen": [user, said[0]], "rejected": [user, said[1]]})
    (path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = finished(
        toy,
        tmp_path / "dpo",
        *DP2,
        TRAIN,
        "objective.kind=dpo",
        "objective.loss_weighting=seq-mean-token-mean",
        f"data.path={path}/pairs.jsonl",
    )
    assert [line["step"] for line in lines] == [1, 2]
    # The reference is the model itself at the first step.
    assert lines[0]["loss"] == pytest.approx(0.6931, abs=1e-3)


def test_a_truncated_image_is_every_rank_s_error(toy: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bad"
    shutil.copytree(toy, folder / "toy")
    lines = (folder / "toy/rollouts.jsonl").read_text().splitlines()
    places = [(n, json.loads(line)["images"][0]) for n, line in enumerate(lines, start=1)]
    # The header of a JPEG says nothing of its end.
    number, name = next(place for place in places if place[1].endswith(".jpeg"))
    image = folder / "toy" / name
    image.write_bytes(image.read_bytes()[:-60])
    done = run_job(2, "megapack", args_of(folder, *GRPO, *DP2, TRAIN), timeout_s=240, cwd=folder)
    assert done.returncode == 1
    assert f"rollouts.jsonl:{number}: image 0 ({name})" in done.stdout
    assert "cannot be decoded" in done.stdout
    assert "Traceback" not in done.stdout


def test_seconds_of_images_are_traced_and_fitted(toy: Path, tmp_path: Path) -> None:
    fits = ("plan.calibrate=online", "plan.calibrate_interval=2", "train.trace_steps=2")
    finished(toy, tmp_path, "objective.kind=grpo", *PP2_VPP2, TRAIN, *fits)
    folder = tmp_path / "runs/run"
    traced = [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]
    assert len(traced) == 2
    for line in traced:
        (step,) = line["plan"]["steps"]
        owners = {image[3] for image in step["images"]}
        kinds = {event[4] for event in line["events"]}
        assert kinds >= {"F", "B", "E", "T"}
        # Stages in order; each that has images takes time before the first forward.
        first = min(event[5] for event in line["events"] if event[4] == "F")
        encoded = {event[1]: event[6] - event[5] for event in line["events"] if event[4] == "E"}
        assert owners == {0, 1} == encoded.keys()
        assert all(0 < seconds < first for seconds in encoded.values())
    fitted = read_cost(folder / "cost.yaml", Layout(pp=2, vpp=2))
    assert fitted.per_patch + fitted.per_patch_sq > 0
    assert fitted.tower_ratio > 0.2
    args = ["report", "runs/run", "-o", "page.html"]
    page = run_job(1, "megapack", args, timeout_s=60, cwd=tmp_path)
    assert page.returncode == 0, page.stdout
