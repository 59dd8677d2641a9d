"""Folders of models with images: the tower is loaded and exported bit by bit, as the decoder is."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.dist.hf.hf_images_worker import CASES
from tests.dist.spawn import checked_job
from tests.marks import needs_hybrid
from tests.megatron import HAS_HYBRID
from tests.toy_towers import write_image_model
from tests.unit.job.hf.tiny_llama import read_folder

pytestmark = pytest.mark.dist

RUNNABLE = [name for name, case in CASES.items() if HAS_HYBRID or not case.is_hybrid]
STACKED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def rewritten(folder: Path, like: Path, tensors: dict[str, Tensor]) -> None:
    """A folder's copy with other tensors."""
    shutil.copytree(like, folder)
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all cases' exports, beside that of the models."""
    folder = tmp_path_factory.mktemp("images")
    models = folder / "models"
    models.mkdir()
    (folder / "out").mkdir()
    for family in ("qwen3_vl", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe"):
        write_image_model(models / family, family)
    write_image_model(models / "moe_rows", "qwen3_vl_moe")
    # As published: what is multiplied is the transposed matrix.
    columns = {
        name: value.transpose(1, 2) if name.endswith(STACKED) else value
        for name, value in read_folder(models / "moe_rows").items()
    }
    rewritten(models / "moe_columns", models / "moe_rows", columns)
    # As transformers 5 names them.
    renamed = {
        f"model.{name}"
        if name.startswith("visual.")
        else name.replace("model.", "model.language_model."): value
        for name, value in read_folder(models / "qwen2_5_vl").items()
    }
    rewritten(models / "renamed", models / "qwen2_5_vl", renamed)
    for world in (1, 2):
        names = [name for name in RUNNABLE if CASES[name].layout.world_size == world]
        names += ["error"] * (world == 2)
        args = [str(models), str(folder / "out"), *names]
        checked_job(world, "tests.dist.hf.hf_images_worker", args, timeout_s=300)
    return folder


def cases() -> list[Any]:
    """The cases' names."""
    return [
        pytest.param(name, marks=needs_hybrid if case.is_hybrid else ())
        for name, case in CASES.items()
    ]


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Names of tensors that are not equal bit by bit."""
    assert found.keys() == expected.keys()
    return [name for name, value in expected.items() if not torch.equal(found[name], value)]


@pytest.mark.parametrize("name", cases())
def test_an_export_without_training_is_bitwise_the_folder(name: str, ran: Path) -> None:
    expected = read_folder(ran / "models" / CASES[name].folder)
    assert differing(read_folder(ran / "out" / name), expected) == []


@pytest.mark.parametrize("name", cases())
def test_a_checkpoints_export_has_the_trained_tower(name: str, ran: Path) -> None:
    if CASES[name].vision != "train":
        assert not (ran / "out" / f"{name}_saved").exists()
        return
    expected = read_folder(ran / "models" / CASES[name].folder)
    trained = {one: value + 1 if "visual." in one else value for one, value in expected.items()}
    assert differing(read_folder(ran / "out" / f"{name}_saved"), trained) == []


@pytest.mark.parametrize("name", cases())
def test_every_rank_has_transformers_tower(name: str, ran: Path) -> None:
    from transformers import AutoModelForImageTextToText

    case = CASES[name]
    model = AutoModelForImageTextToText.from_pretrained(ran / "models" / case.folder)
    expected = {f"visual.{one}": value for one, value in model.model.visual.state_dict().items()}
    for rank in range(case.layout.world_size):
        held = torch.load(ran / "out" / f"{name}_rank{rank}.pt")
        tower = {one.partition("(")[0]: value for one, value in held.items() if "visual." in one}
        assert differing(tower, {} if case.vision == "off" else expected) == []


def test_experts_are_the_same_whatever_their_form(ran: Path) -> None:
    """Gates and what they multiply, and the second product, of each expert."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(ran / "models" / "moe_rows")
    held = torch.load(ran / "out" / "single_columns_rank0.pt")
    for number, layer in enumerate(model.model.language_model.layers):
        for end, own in (("linear_fc1", "gate_up_proj"), ("linear_fc2", "down_proj")):
            for expert, whole in enumerate(getattr(layer.mlp.experts, own)):
                begin = f"decoder.layers.{number}.mlp.experts.experts.{end}.weight({expert},)"
                parts = [value for name, value in sorted(held.items()) if name.startswith(begin)]
                assert torch.equal(torch.cat(parts).flatten(0, -2), whole)


def test_a_tower_without_a_folders_tensors_is_refused(ran: Path) -> None:
    for rank in range(2):
        found = (ran / "out" / f"error_rank{rank}").read_text()
        assert "has 6 tensors that the model would not use" in found
        assert "model.visual.deepstack_merger_list.1." in found
