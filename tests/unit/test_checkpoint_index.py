"""An index of a checkpoint is read only if it can do nothing but be read."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.metadata import Metadata

from megapack.checkpoint_index import INDEX, check_index
from megapack.errors import CheckpointError

pytestmark = [
    pytest.mark.unit,
    # torch says so of a process without a group.
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


class Calls:
    """Unpickled, it calls a function."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._call = function, args

    def __reduce__(self) -> Any:
        return self._call


def named(module: str, name: str) -> bytes:
    """A pickle that is a name of a module, with dots or without."""
    texts = (
        pickle.SHORT_BINUNICODE + bytes([len(text)]) + text.encode() for text in (module, name)
    )
    return pickle.PROTO + b"\x04" + b"".join(texts) + pickle.STACK_GLOBAL + pickle.STOP


def save(folder: Path, **tensors: Any) -> None:
    checkpoint.save(tensors, checkpoint_id=folder, no_dist=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_an_index_of_tensors_is_taken(dtype: torch.dtype, tmp_path: Path) -> None:
    save(tmp_path, weight=torch.zeros(3, 4, dtype=dtype), bias=torch.zeros(()))
    check_index(tmp_path)


def test_entries_that_torch_would_unpickle_are_refused(tmp_path: Path) -> None:
    save(tmp_path, weight=torch.zeros(3), extra={"a": {1, 2}})
    with pytest.raises(CheckpointError, match=r"names torch.*BytesStorageMetadata"):
        check_index(tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (pickle.dumps(Calls(os.mkdir, "made")), r"names posix.mkdir, which no checkpoint"),
        (
            pickle.dumps(Metadata({}, planner_data=Calls(eval, "open('made', 'w')"))),
            r"names builtins.eval",
        ),
        (pickle.dumps(Calls(torch.load, "made")), r"names torch.serialization.load"),
        (named("torch.distributed.checkpoint.metadata", "os.mkdir"), r"metadata.os.mkdir"),
        (named("torch", "float32.__class__"), r"names torch.float32.__class__"),
        (named("torch", "compile"), r"names torch.compile"),
        (pickle.dumps([1]), "holds no index"),
        (pickle.dumps(Metadata({}))[:-9], "cannot be read"),
        (b"", "cannot be read"),
    ],
)
def test_an_index_that_is_more_or_less_is_refused(
    content: bytes, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / INDEX).write_bytes(content)
    with pytest.raises(CheckpointError, match=says) as error:
        check_index(tmp_path)
    assert "\n" not in str(error.value)
    assert os.listdir() == [INDEX]
