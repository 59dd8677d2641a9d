"""The pickled index of a checkpoint: torch's own is accepted, one that runs code is refused."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from megapack.errors import CheckpointError
from megapack.job.checkpoint.checkpoints import _read_tensors
from megapack.job.checkpoint.index import check_index, read_fault

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


READ_FAULTS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut": (
        lambda data: data[:-100],
        "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central "
        "directory",
    ),
    "directory": (
        lambda data: data.replace(b"PK\1\2", b"QQ\1\2"),
        "RuntimeError: PytorchStreamReader failed reading zip archive: invalid header or archive "
        "is corrupted",
    ),
    "pickle": (
        lambda data: data.replace(b"ctorch._utils", b"cborch._utils"),
        "UnpicklingError: Unsupported global: GLOBAL borch._utils._rebuild_tensor_v2 was not an "
        "allowed global by default",
    ),
}


def load_error(folder: Path) -> BaseException:
    with pytest.MonkeyPatch.context() as patch:
        # torch warns that a single process loads.
        patch.setattr("warnings.warn", lambda *args, **kwargs: None)
        state = {"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}
        with pytest.raises(torch_checkpoint.CheckpointException) as caught:
            torch_checkpoint.load(state, checkpoint_id=folder, no_dist=True)
    return caught.value


@pytest.mark.parametrize("fault", READ_FAULTS)
def test_the_reason_that_a_tensor_cannot_be_read(folder: Path, fault: str) -> None:
    damage, reason = READ_FAULTS[fault]
    (file,) = folder.glob("*.distcp")
    file.write_bytes(damage(file.read_bytes()))
    assert read_fault(load_error(folder)) == reason
    alone = folder / "rank0.pt"
    torch.save({"a": torch.ones(3)}, alone)
    alone.write_bytes(damage(alone.read_bytes()))
    with pytest.raises(CheckpointError) as refused:
        _read_tensors(alone)
    advice = "set train.resume to another checkpoint"
    assert str(refused.value) == f"{alone} cannot be read ({reason}); {advice}"
