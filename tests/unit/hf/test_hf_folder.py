"""Folders that cannot be loaded are refused before a tensor is read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megapack.errors import ConfigError
from megapack.hf.folder import HfFolder
from megapack.hf.load import check_tensors, names_of
from tests.unit.hf.tiny_llama import hf_tensors, write_folder, write_index

pytestmark = pytest.mark.unit

FIRST = "model-00001-of-00002.safetensors"


@pytest.mark.parametrize("num_files", [1, 2, 3])
def test_tensors_of_a_folder(tmp_path: Path, num_files: int) -> None:
    folder = HfFolder(write_folder(tmp_path / "model", num_files=num_files))
    expected = {name: tuple(value.shape) for name, value in hf_tensors().items()}
    assert {name: one.shape for name, one in folder.tensors.items()} == expected
    assert {one.dtype for one in folder.tensors.values()} == {"F32"}
    assert check_tensors(expected, folder, names_of(folder)) == []


def truncate(folder: Path) -> None:
    data = (folder / FIRST).read_bytes()
    (folder / FIRST).write_bytes(data[:-4])


def remove_file(folder: Path) -> None:
    (folder / FIRST).unlink()


def remove_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()


def only_bin(folder: Path) -> None:
    remove_index(folder)
    for file in folder.glob("*.safetensors"):
        file.rename(file.with_name("pytorch_model.bin"))


def index_of_another_file(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    weight_map = json.loads(path.read_text())["weight_map"]
    assert weight_map["lm_head.weight"] != FIRST
    weight_map["lm_head.weight"] = FIRST
    write_index(folder, weight_map)


def index_without_a_tensor(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    weight_map = json.loads(path.read_text())["weight_map"]
    del weight_map["model.norm.weight"]
    write_index(folder, weight_map)


def index_outside(folder: Path) -> None:
    write_index(folder, {"lm_head.weight": "../other.safetensors"})


def broken_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{")


def quantize(folder: Path) -> None:
    values = {
        "model.norm.weight": torch.zeros(8).to(torch.float8_e4m3fn),
        "model.norm.weight_scale_inv": torch.zeros(1),
    }
    save_file(values, folder / FIRST)


def twice(folder: Path) -> None:
    save_file(hf_tensors(), folder / FIRST)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, f"{FIRST} cannot be read .*again"),
        (remove_file, f"lacks {FIRST}, one of the 2 files of its index"),
        (remove_index, "has neither model.safetensors nor model.safetensors.index.json"),
        (only_bin, "has weights as pytorch_model.bin, not as safetensors; .*save_pretrained"),
        (index_of_another_file, f"says that lm_head.weight is in {FIRST}, it is in"),
        (index_without_a_tensor, "does not list model.norm.weight"),
        (index_outside, "weight_map is"),
        (broken_index, "is not an index of safetensors"),
        (quantize, "model.norm.weight.* belongs to quantized weights; make a folder"),
        (twice, "is in model-00001-of-00002.safetensors and in"),
    ],
)
def test_refused_folders(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    folder = write_folder(tmp_path / "model")
    damage(folder)
    with pytest.raises(ConfigError, match=message) as error:
        HfFolder(folder)
    assert "\n" not in str(error.value)
    assert str(folder) in str(error.value)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{re.escape(str(tmp_path / 'no'))} is not a folder"):
        HfFolder(tmp_path / "no")


def test_tensors_are_compared_with_the_model(tmp_path: Path) -> None:
    folder = HfFolder(write_folder(tmp_path / "model"))
    names = names_of(folder)
    shapes = {name: tuple(value.shape) for name, value in hf_tensors().items()}
    with pytest.raises(ConfigError, match=r"lacks 1 of the model's 13 tensors, such as more"):
        check_tensors({**shapes, "more": (1,)}, folder, names)
    with pytest.raises(
        ConfigError, match=r"norm\.weight has the shape \[8\], the model needs \[9\]"
    ):
        check_tensors({**shapes, "model.norm.weight": (9,)}, folder, names)
    without = {name: shape for name, shape in shapes.items() if name != "model.norm.weight"}
    with pytest.raises(ConfigError, match=r"has 1 tensors that the model would not use, such as"):
        check_tensors(without, folder, names)
    tied = {name: shape for name, shape in shapes.items() if name != "lm_head.weight"}
    assert check_tensors(tied, folder, names) == ["lm_head.weight"]
    # A fresh value head starts from zeros.
    assert check_tensors({**tied, "score.weight": (1, 8)}, folder, names) == ["lm_head.weight"]
