"""The pickled index of a checkpoint: torch's own is accepted, one that runs code is refused."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from megapack.checkpoint.index import check_index
from megapack.errors import CheckpointError

pytestmark = pytest.mark.unit


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of tensors, as torch writes it."""
    state = {"a": torch.ones(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    with pytest.MonkeyPatch.context() as patch:
        # torch warns that a single process saves.
        patch.setattr("warnings.warn", lambda *args, **kwargs: None)
        torch_checkpoint.save(state, checkpoint_id=tmp_path, no_dist=True)
    return tmp_path


class _Runs:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_an_index_of_tensors_is_accepted(folder: Path) -> None:
    check_index(folder)


def test_an_index_that_runs_code_is_refused_before_running(folder: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = _Runs(folder / "made")
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"is not an index of tensors \(it names .*\); set"):
        check_index(folder)
    assert not (folder / "made").exists()


def test_an_index_of_pickles_is_refused(folder: Path) -> None:
    metadata = Metadata(state_dict_metadata={"a": BytesStorageMetadata()})
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="BytesStorageMetadata"):
        check_index(folder)


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"no pickle", b"\x80\x04}(]K\x01s."])
def test_a_damaged_index_is_an_error_of_one_line(folder: Path, content: bytes) -> None:
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        check_index(folder)
    assert "\n" not in str(caught.value)
