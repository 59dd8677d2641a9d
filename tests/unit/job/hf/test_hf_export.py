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
from megapack.job.hf import output
from megapack.job.hf.blocks import Block
from megapack.job.hf.export import Exporter
from megapack.job.hf.export_plan import plan_export
from megapack.job.hf.folder import HfFolder
from megapack.job.hf.load import names_of
from tests.unit.job.checkpoint.test_checkpoint_crash import crashing
from tests.unit.job.hf.tiny_llama import (
    as_snapshot,
    hf_tensors,
    megatron_tensors,
    read_folder,
    write_folder,
)

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

    monkeypatch.setattr("megapack.job.hf.shards.ShardWriter.write", full)
    with pytest.raises(CheckpointError, match=r"out cannot be written \(No space left on device\)"):
        exporter(tmp_path / "out", like).export(sources())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    monkeypatch.undo()
    monkeypatch.setattr(output.shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(CheckpointError, match=r"does not fit into the 0 MiB that are free"):
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


COPIED = (
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json"),
    *("merges.txt", "spiece.model", "qwen.tiktoken", "chat_template.jinja", "modules.json"),
    *("preprocessor_config.json", "additional_chat_templates/tools.jinja", "1_Pooling/config.json"),
)
LEFT = (
    *("adapter_config.json", "adapter_model.safetensors", "params.json", "pytorch_model.bin"),
    *("consolidated.safetensors", "model.safetensors.index.json.old", "hf_quant_config.json"),
    *("pytorch_model.bin.index.json", "quantize_config.json", "trainer_state.json", "notes.txt"),
    *("modeling_toy.py", "model.gguf", "original/params.json", ".git/config"),
)


def test_only_what_readers_want_is_copied(tmp_path: Path) -> None:
    like = write_folder(tmp_path / "model")
    for name in (*COPIED, *LEFT):
        (like / name).parent.mkdir(exist_ok=True)
        (like / name).write_text(f'{{"of": "{name}"}}')
    exporter(tmp_path / "out", like).export(sources())
    found = {str(one.relative_to(tmp_path / "out")) for one in (tmp_path / "out").rglob("*.*")}
    assert found == {"config.json", "model.safetensors", *COPIED}
    assert (tmp_path / "out" / "merges.txt").read_text() == '{"of": "merges.txt"}'


def test_code_is_copied_where_a_config_names_it(tmp_path: Path) -> None:
    like = write_folder(tmp_path / "model")
    (like / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": "tokens.Toy"}}')
    for name in ("tokens.py", "helpers.py"):
        (like / name).write_text("")
    exporter(tmp_path / "out", like).export(sources())
    assert {one.name for one in (tmp_path / "out").glob("*.py")} == {"tokens.py", "helpers.py"}


def test_links_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    like = write_folder(tmp_path / "model")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key.jinja").write_text("a key")

    def as_link(name: str, target: str) -> None:
        (like / name).symlink_to(target)

    refused: list[tuple[Any, str, str]] = [
        (as_link, "vocab.json", "../secret/key.jinja"),
        (as_link, "vocab.json", str(tmp_path / "secret" / "key.jinja")),
        (as_link, "additional_chat_templates", "../secret"),
        (as_link, "merges.txt", "/dev/zero"),
        (lambda name, _: os.mkfifo(like / name), "vocab.txt", ""),
        (lambda name, _: (like / name).mkdir(), "vocab.txt", ""),
    ]
    for make, name, target in refused:
        make(name, target)
        with pytest.raises(ConfigError, match=rf"{name}.* is (a link to .*, outside|no file)"):
            exporter(tmp_path / "out", like).export(sources())
        assert sorted(one.name for one in tmp_path.iterdir()) == ["model", "secret"]
        (like / name).rmdir() if target == "" and (like / name).is_dir() else (like / name).unlink()
    # A link that leads nowhere is no file, and files with other names are not read.
    as_link("merges.txt", "merges.txt")
    as_link("vocab.json", "gone.json")
    as_link("notes.md", "../secret/key.jinja")
    as_link("adapter_config.json", "/dev/zero")
    as_link("tokenizer_config.json", "tokenizer.json")
    exporter(tmp_path / "out", like).export(sources())
    names = {one.name for one in (tmp_path / "out").iterdir()}
    assert names == {
        *("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    }
    assert not (tmp_path / "out" / "tokenizer_config.json").is_symlink()


def test_a_snapshot_of_the_hubs_cache_is_exported(tmp_path: Path) -> None:
    like = as_snapshot(write_folder(tmp_path / "model"))
    (tmp_path / "link").symlink_to(like)
    # As older clients fill a folder outside of the cache.
    (tmp_path / "local").mkdir()
    for file in like.iterdir():
        (tmp_path / "local" / file.name).symlink_to(file.resolve())
    for number, folder in enumerate((like, tmp_path / "link", tmp_path / "local")):
        out = tmp_path / f"out{number}"
        exporter(out, folder).export(sources())
        assert (out / "tokenizer.json").read_text() == "{}"
        assert not any(one.is_symlink() for one in out.iterdir())


def test_an_export_to_a_link_is_where_it_leads(tmp_path: Path) -> None:
    like = write_folder(tmp_path / "model")
    for name in ("empty", "new"):
        (tmp_path / "disk" / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"to_{name}").symlink_to(tmp_path / "disk" / name)
    (tmp_path / "disk" / "empty").mkdir()
    for name in ("empty", "new"):
        exporter(tmp_path / f"to_{name}", like).export(sources())
        assert (tmp_path / f"to_{name}").is_symlink()
        assert read_folder(tmp_path / "disk" / name).keys() == hf_tensors().keys()
    assert sorted(one.name for one in (tmp_path / "disk").iterdir()) == ["empty", "new"]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["disk", "model", "to_empty", "to_new"]


def test_an_export_does_not_replace_what_it_reads(tmp_path: Path) -> None:
    like = write_folder(tmp_path / "all" / "model")
    with pytest.raises(ConfigError, match=r"all has .*model within"):
        exporter(tmp_path / "all", like).export(sources(), replace=True)
    exporter(like / "trained", like).export(sources())
    exporter(like, like, dtype="bf16").export(sources(), replace=True)
    assert {one.dtype for one in read_folder(like).values()} == {torch.bfloat16}
