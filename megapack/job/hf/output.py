"""The folder of an export: written under another name, renamed when complete."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from megapack.base.files import read_text, strict_json, sync
from megapack.errors import ConfigError
from megapack.job.checkpoint import folders
from megapack.job.checkpoint.folders import part_path
from megapack.job.config.hf_config import MTP_KEYS, read_hf_config, value_architecture

# What readers want of a model's folder besides weights and config.json. Nothing else is copied:
# with an adapter_config.json, a params.json or an index of the folder they load another model.
_COPIED = (
    *("generation_config.json", "*processor_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "tekken.json", "*.model", "*.tiktoken"),
    *("chat_template.json", "*.jinja", "additional_chat_templates/*.jinja"),
    # Of embedding models: how they pool.
    *("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"),
    "[0-9]_*/config.json",
)
# The code of models and tokenizers that transformers does not have; these files name it.
_CODE = "*.py"
_NAMES_CODE = ("config.json", "tokenizer_config.json", "processor_config.json")
# A file in the cache of the hub's clients.
_CACHED = re.compile(r".*/models--[^/]+/blobs/[0-9a-f]{40,64}")


def target(folder: str | Path) -> Path:
    """The folder of an export, without `..` after a name; of a link, where it leads.

    Raises:
        ConfigError: it is the root of the file system.
    """
    path = Path(os.path.normpath(folder))
    if path.is_symlink():
        path = Path(os.path.realpath(path))
    if path.name in ("", ".."):
        path = Path(os.path.abspath(folder))
    if not path.name:
        raise ConfigError(f"{path} is no folder of its own; set one below it")
    return path


def check_free(folder: Path, *, replace: bool) -> None:
    """Raise ConfigError if something is at the folder's place."""
    if folder.exists() and not replace and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists; set another folder, or remove it")


def check_apart(folder: Path, like: Path) -> None:
    """Raise ConfigError if the folder has the model's within, which replacing it would remove."""
    source = Path(os.path.realpath(like))
    if Path(os.path.realpath(folder)) in source.parents:
        raise ConfigError(f"{folder} has {like} within, which the export reads; set another folder")


def open_part(folder: Path) -> None:
    """Make an empty folder to write into; what a killed export left there is removed."""
    part = part_path(folder)
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)


def finish(folder: Path, *, replace: bool) -> None:
    """Sync all files to the disk, and give the folder its name.

    Raises:
        ConfigError: see `check_free`; something came to its place meanwhile.
    """
    check_free(folder, replace=replace)
    part = part_path(folder)
    for path in (*part.rglob("*"), part):
        sync(path)
    old = folder.with_name(f"{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.rename(folder, old)
    os.rename(part, folder)
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def abandon(folder: Path) -> None:
    """Remove what was written of a folder."""
    shutil.rmtree(part_path(folder), ignore_errors=True)


def writing(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Turn errors of writing within the block into a CheckpointError about the folder."""
    return folders.writing(folder, elsewhere="set another folder", after="")


def check_space(folder: Path, num_bytes: int) -> None:
    """Raise CheckpointError if the disk of a folder has less room than this."""
    folders.check_space(part_path(folder), num_bytes)


def small_files(like: Path) -> list[str]:
    """The files of a folder that an export copies, such as the tokenizer's, by their paths in it.

    Raises:
        ConfigError: one is no file, or a link out of the folder: into an export, which others may
            read, comes nothing else of this machine. Links to files of the hub's cache, of which
            its folders are made, are allowed.
    """
    root = Path(os.path.realpath(like))
    texts = [file.read_bytes() for file in map(like.joinpath, _NAMES_CODE) if file.is_file()]
    has_code = any(b'"auto_map"' in text for text in texts)
    found = []
    for pattern in (*_COPIED, _CODE) if has_code else _COPIED:
        for file in sorted(like.glob(pattern)):
            real = Path(os.path.realpath(file))
            if not file.is_file():
                raise ConfigError(f"{file} is no file; remove it")
            if not real.is_relative_to(root) and not _CACHED.fullmatch(str(real)):
                raise ConfigError(
                    f"{file} is a link to {real}, outside of the model's folder, and an export "
                    "would copy it; put the file itself there, or remove the link"
                )
            found.append(str(file.relative_to(like)))
    return found


def copy_small_files(like: Path, folder: Path) -> None:
    """Copy a folder's `small_files` into an open part."""
    for name in small_files(like):
        own = part_path(folder) / name
        own.parent.mkdir(exist_ok=True)
        shutil.copyfile(like / name, own)


def write_config(like: Path, folder: Path, *, dtype: str | None, is_value_model: bool) -> None:
    """Write config.json: the one of `like` with what the export changes.

    Args:
        dtype: torch's name of the weights' type; None = as it was.
        is_value_model: whether the model gives one value per token instead of logits.
    """
    config: dict[str, Any] = strict_json(read_text(like / "config.json"))
    own = config.get("text_config", config)
    if dtype is not None:
        # transformers 5 writes `dtype`; published folders have `torch_dtype`.
        for keys in (config, own):
            keys["dtype" if "dtype" in keys else "torch_dtype"] = dtype
    if is_value_model:
        for key in MTP_KEYS:
            if own.get(key):
                own[key] = 0
        config["architectures"] = [value_architecture(read_hf_config(like).architecture)]
        # One label is how transformers says that the output is a score.
        config["id2label"] = {"0": "LABEL_0"}
        config["label2id"] = {"LABEL_0": 0}
    text = json.dumps(config, indent=2) + "\n"
    (part_path(folder) / "config.json").write_text(text, encoding="utf-8")
