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
from megapack.job.hf.folder import HfFolder
from megapack.job.hf.load import check_tensors, names_of
from megapack.job.hf.unused import check_values
from tests.unit.job.hf.tiny_llama import hf_tensors, write_folder, write_index

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


def folder_with(path: Path, **tensors: torch.Tensor) -> HfFolder:
    """A tied folder with these tensors in addition, or in place of its own."""
    write_folder(path, num_files=1, tie_word_embeddings=True)
    every = {**hf_tensors(), **tensors}
    save_file({name: one.contiguous() for name, one in every.items()}, path / "model.safetensors")
    return HfFolder(path)


def look(folder: HfFolder, *more: str) -> None:
    """Load's look at what a model with the folder's first tensors leaves out."""
    names = names_of(folder)
    model = {name: one.shape for name, one in folder.tensors.items() if name in hf_tensors()}
    del model["lm_head.weight"]
    model |= dict.fromkeys(more, (1, 8))
    ignored = check_tensors(model, folder, names)
    check_values(ignored, model, folder, names, device=torch.device("cpu"))


def test_a_head_of_its_own_beside_tied_embeddings_is_refused(tmp_path: Path) -> None:
    embedding = hf_tensors()["model.embed_tokens.weight"]
    other = embedding.clone()
    other[4, 7] += 1e-6
    for number, (head, is_fine) in enumerate(
        (
            (embedding, True),
            (embedding.double(), True),
            (other, False),
            (embedding[:4], False),
            (embedding.bfloat16(), False),
        )
    ):
        folder = folder_with(tmp_path / str(number), **{"lm_head.weight": head})
        if is_fine:
            look(folder)
            continue
        message = (
            f"{re.escape(str(folder))}: lm_head.weight differs from model.embed_tokens.weight, .*"
            "; set tie_word_embeddings in config.json to false"
        )
        with pytest.raises(ConfigError, match=message) as error:
            look(folder)
        assert "\n" not in str(error.value)
        # A value head replaces it.
        look(folder, "score.weight")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.layers.1.mlp.up_proj.weight", "counts 1 layers, and of multi-token prediction 0"),
        ("model.mtp_layers.0.input_proj.weight", "counts 1 layers, and of multi-token"),
        ("mtp.fc.weight", "counts 1 layers, .* that the folder has: correct it"),
        ("model.layers.0.self_attn.q_proj.bias", "its config.json is of another model"),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", "of another model"),
        ("v_head.summary.weight", "of another model"),
    ],
)
def test_tensors_that_a_model_cannot_have_are_refused_by_name(
    tmp_path: Path, name: str, message: str
) -> None:
    folder = folder_with(tmp_path / "model", **{name: torch.ones(2, 2)})
    with pytest.raises(ConfigError, match=rf"1 tensors .* such as {re.escape(name)}; .*{message}"):
        look(folder)


@pytest.mark.parametrize(
    "index",
    [
        *("", "[]", "7", "null", '{"weight_map": []}', '{"weight_map": null}', "[" * 10**5),
        *('{"weight_map": {"a": "x\\u0000"}}', '{"weight_map": {"a": "/etc/passwd"}}'),
        f'{{"weight_map": {{"a": {10**400}}}}}',
        '{"weight_map": {"a": "b"}, "weight_map": {"a": "c"}}',
    ],
)
def test_indices_of_another_form_are_one_line(tmp_path: Path, index: str) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigError) as error:
        HfFolder(folder)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600
