"""A save on a thread: its state, its error, and its end; and how it is split over threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import SavePlan
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from megapack.job.checkpoint.writer import PendingSave, StateWriter, _Planner, _split
from tests.unit.job.checkpoint.test_checkpoint_folders import manifest

pytestmark = pytest.mark.unit


class _Writer:
    """Writes until it is abandoned."""

    def __init__(self) -> None:
        self.abandoned = threading.Event()

    def abandon(self) -> None:
        self.abandoned.set()


def pending(work: Callable[[], None], writer: Any = None) -> PendingSave:
    return PendingSave(Path("checkpoints/step-00000003"), manifest(3), writer, work)


def test_its_error_is_raised_by_the_wait() -> None:
    def work() -> None:
        raise OSError("No space left on device")

    save = pending(work)
    with pytest.raises(OSError, match="No space left"):
        save.wait()
    assert (save.is_writing, save.has_failed) == (False, True)


def test_an_abandoned_save_ends_without_an_error() -> None:
    writer = _Writer()

    def work() -> None:
        assert writer.abandoned.wait(10.0)
        raise RuntimeError("the save was abandoned")

    save = pending(work, writer)
    save.abandon()
    assert not save.is_writing


def test_an_abandoned_planner_gives_no_more_tensors() -> None:
    planner = _Planner(dedup_replicated_tensors=False, flatten_state_dict=False)
    planner.abandoned.set()
    with pytest.raises(RuntimeError, match="the save was abandoned"):
        planner.resolve_data(_item("a", 4))


def _item(name: str, rows: int) -> WriteItem:
    """A part of `rows` rows of a tensor of 1000 rows of 2 fp32 numbers."""
    chunk = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([rows, 2]))
    data = TensorWriteData(chunk, TensorProperties(dtype=torch.float32), torch.Size([1000, 2]))
    return WriteItem(MetadataIndex(name, torch.Size([0, 0])), WriteItemType.SHARD, tensor_data=data)


def test_threads_get_about_equal_bytes() -> None:
    items = [_item(str(rows), rows) for rows in (100, 1, 60, 40, 30, 30, 40, 99)]
    lists = _split(items, 4)
    rows = [sum(item.tensor_data.chunk.sizes[0] for item in one) for one in lists]  # type: ignore[union-attr]
    assert rows == [100, 99, 91, 110]
    assert sorted(item.index.fqn for one in lists for item in one) == sorted(
        item.index.fqn for item in items
    )
    assert [len(one) for one in _split(items[:2], 4)] == [1, 1]
    assert _split([], 4) == []


def test_a_file_is_written_with_the_gpu_of_the_rank_as_current_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered = []

    def enter(device: torch.device) -> contextlib.nullcontext[None]:
        entered.append(device)
        return contextlib.nullcontext()

    monkeypatch.setattr(torch.cuda, "device", enter)
    writer = StateWriter({}, tmp_path, num_threads=1, device=torch.device("cuda:3"))
    writer._plan = SavePlan([], storage_data=_StoragePrefix("__0_"))
    assert writer._write_part(0, []) == []
    assert entered == [torch.device("cuda:3")]


def test_torch_copies_ahead_on_a_gpu_unless_the_tensors_are_staged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    on_host = StateWriter({}, tmp_path, num_threads=1, device=torch.device("cpu"))
    writer = StateWriter({}, tmp_path, num_threads=1, device=torch.device("cuda:0"))
    assert (on_host._files.per_thread_copy_ahead, writer._files.per_thread_copy_ahead) == (0, 2**26)
    writer.stage()
    assert writer._files.per_thread_copy_ahead == 0
