"""Exports: the plan of who writes what, files of tensors, and folders that are whole or absent."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megapack.errors import CheckpointError, ConfigError
from megapack.hf import output
from megapack.hf.blocks import Block
from megapack.hf.export import Exporter
from megapack.hf.export_plan import plan_export
from megapack.hf.folder import HfFolder
from megapack.hf.load import names_of
from tests.unit.checkpoint.test_checkpoint_crash import crashing
from tests.unit.hf.tiny_llama import hf_tensors, megatron_tensors, read_folder, write_folder

pytestmark = pytest.mark.unit


def sources(**others: torch.Tensor) -> dict[Block, Any]:
    """Megatron's tensors, each as one block."""
    found = {}
    for key, value in {**megatron_tensors(), **others}.items():
        sizes = tuple(value.shape)
        block = Block(key, (), (0,) * value.dim(), sizes, sizes, value.dtype)
        found[block] = functools.partial(torch.clone, value)
    return found


def exporter(folder: Path, like: Path, **settings: Any) -> Exporter:
    settings = {"dtype": None, "max_shard_bytes": 10**9, **settings}
    return Exporter(folder, like, device=torch.device("cpu"), **settings)


@pytest.mark.parametrize("max_shard_bytes", [10**9, 600])
def test_an_export_is_bitwise_the_folder(tmp_path: Path, max_shard_bytes: int) -> None:
    like = write_folder(tmp_path / "model")
    exported = exporter(tmp_path / "out", like, max_shard_bytes=max_shard_bytes).export(sources())
    expected = hf_tensors()
    found = read_folder(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert exported.num_bytes == sum(value.nbytes for value in expected.values())
    # The index and the files' headers fit together.
    assert HfFolder(tmp_path / "out").tensors.keys() == expected.keys()
    has_index = (tmp_path / "out" / "model.safetensors.index.json").exists()
    assert has_index == (max_shard_bytes == 600) == (exported.num_files > 1)
    for file in (tmp_path / "out").glob("*.safetensors"):
        values = [one for one in found.values() if one.nbytes > max_shard_bytes]
        assert values == []
        assert file.stat().st_size < max_shard_bytes + 1500
    config = json.loads((like / "config.json").read_text())
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


def test_another_type(tmp_path: Path) -> None:
    like = write_folder(tmp_path / "model")
    exporter(tmp_path / "out", like, dtype="bf16").export(sources())
    found = read_folder(tmp_path / "out")
    assert all(torch.equal(found[n], value.bfloat16()) for n, value in hf_tensors().items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_a_value_model_is_a_classifier_with_one_label(tmp_path: Path) -> None:
    like = write_folder(tmp_path / "model")
    score = torch.full((1, 8), 0.5)
    exporter(tmp_path / "out", like, dtype="bf16").export(sources(**{"output_layer.weight": score}))
    found = read_folder(tmp_path / "out")
    assert "lm_head.weight" not in found
    assert torch.equal(found["score.weight"], score.bfloat16())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert len(config["id2label"]) == 1


def test_an_existing_folder_is_kept(tmp_path: Path) -> None:
    like = write_folder(tmp_path / "model")
    out = tmp_path / "out"
    out.mkdir()
    exporter(out, like).export(sources())
    kept = (out / "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match=r"out exists; set another folder, or remove it"):
        exporter(out, like, dtype="bf16").export(sources())
    assert (out / "model.safetensors").read_bytes() == kept
    exporter(out, like, dtype="bf16").export(sources(), replace=True)
    assert (out / "model.safetensors").read_bytes() != kept
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def test_a_model_that_is_not_the_folders_is_refused(tmp_path: Path) -> None:
    like = write_folder(tmp_path / "model")
    wrong = {"decoder.final_layernorm.weight": torch.zeros(9)}
    with pytest.raises(ConfigError, match=r"the shape \[8\], the model needs \[9\]"):
        exporter(tmp_path / "out", like).export(sources(**wrong))
    held = sources()
    lost = {block: read for block, read in held.items() if "linear_fc1.weight" not in block.key}
    with pytest.raises(ConfigError, match=r"would not use, such as .*gate_proj"):
        exporter(tmp_path / "out", like).export(lost)
    assert not (tmp_path / "out").exists()


def test_a_disk_without_room_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    like = write_folder(tmp_path / "model")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megapack.hf.shards.ShardWriter.write", full)
    with pytest.raises(CheckpointError, match=r"out cannot be written \(No space left on device\)"):
        exporter(tmp_path / "out", like).export(sources())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    monkeypatch.undo()
    monkeypatch.setattr(output.shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(CheckpointError, match=r"does not fit into the 0\.0 GiB that are free"):
        exporter(tmp_path / "out", like).export(sources())


@pytest.mark.parametrize("replace", [False, True])
def test_a_crash_at_any_call_leaves_a_whole_folder_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replace: bool
) -> None:
    like = write_folder(tmp_path / "model")
    expected = hf_tensors()
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    seen = set()
    for crash_at in range(1, 1000):
        out = tmp_path / f"out{crash_at}"
        if replace:
            exporter(out, like).export(sources())
        with crashing(monkeypatch, crash_at) as disk:
            exporter(out, like, max_shard_bytes=600).export(sources(), replace=replace)
        seen.add(out.exists())
        if out.exists():
            found = read_folder(out)
            assert all(torch.equal(found[name], expected[name]) for name in expected)
            assert {"config.json", "tokenizer.json"} <= {path.name for path in out.iterdir()}
        if len(disk.made) < crash_at:
            break
    assert seen == {False, True}
    assert crash_at > 30


def test_writing_is_spread_over_the_ranks(tmp_path: Path) -> None:
    """Of two replicas each writes about half; a rank that holds a third of a tensor sends it."""
    names = names_of(HfFolder(write_folder(tmp_path / "model")))
    whole = list(sources())
    plan = plan_export([whole, whole], names, lambda _, own: own, 10**9)
    written = [sum(t.num_bytes for t in plan.targets if t.writer == rank) for rank in (0, 1)]
    assert min(written) > 0.35 * sum(written)
    assert all(part.holder == target.writer for target in plan.targets for part in target.parts)
    assert len({target.file for target in plan.targets}) == 2

    key = "decoder.layers.0.mlp.linear_fc2.weight"
    left = Block(key, (), (0, 0), (8, 4), (8, 6), torch.float32)
    right = Block(key, (), (0, 4), (8, 2), (8, 6), torch.float32)
    (target,) = plan_export([[right], [left]], names, lambda _, own: own, 10**9).targets
    assert target.writer == 1
    assert {part.holder for part in target.parts} == {0, 1}
    with pytest.raises(ConfigError, match=r"hold 16 of the 48 numbers of decoder\.layers\.0"):
        plan_export([[right], [right]], names, lambda _, own: own, 10**9)
