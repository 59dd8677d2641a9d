"""Writing the tensors of a checkpoint: all ranks plan together, and each one writes its own files.

    stage -> plan (collective) -> write (local, on any thread) -> finish (collective)

The format is torch's, as `torch.distributed.checkpoint.save` writes it. That function's steps are
separate here, so that training can go on during the third. No collective runs on another thread,
and no process is forked: a fork of a process that holds CUDA and communication threads may hang,
and a child process may outlive a killed rank. The threads spend their time in torch's C++ code and
in the kernel, mostly without Python's lock.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import is_main_replica
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint import FileSystemWriter, SavePlan
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from megapack.errors import CheckpointError
from megapack.job.checkpoint.folders import Manifest, part_path, writing
from megapack.ranks.agree import agree
from megapack.ranks.threads import run_on_daemon
from megapack.rows.transfer import host_copies

# Bytes that each thread copies from the GPU ahead of writing them, and one tensor more: with four
# threads 256 MiB and four tensors. At 25 GB/s 64 MiB take 3 ms, much less than a disk.
_AHEAD_BYTES = 64 * 2**20
# Seconds that a run which ends with an error waits for the tensor that is being written. At 1 GB/s
# a tensor of 4 GB takes 4. Chosen by hand.
_ABANDON_S = 8.0


class StateWriter:
    """The tensors of one checkpoint on their way to the disk.

    Args:
        tensors: nested dicts and lists of this rank's sharded tensors. This rank writes those whose
            main replica it has.
        folder: an empty folder that all ranks see.
        num_threads: threads of this rank that write, each into a file of its own.
        device: see `agree`.
    """

    def __init__(
        self, tensors: dict[str, Any], folder: Path, *, num_threads: int, device: torch.device
    ) -> None:
        self._folder = folder
        self._num_threads = num_threads
        self._device = device
        ahead = _AHEAD_BYTES if device.type == "cuda" else 0
        self._files = FileSystemWriter(folder, sync_files=True, per_thread_copy_ahead=ahead)
        self._planner = _Planner(dedup_replicated_tensors=False, flatten_state_dict=False)
        self._tensors = tensors
        self._plan = SavePlan([])
        self._index: Metadata | None = None
        self._written: list[WriteResult] = []

    def stage(self) -> None:
        """Copy what this rank writes into host memory, so that the weights may change afterwards.

        Without this call, `write` reads the weights themselves.
        """
        own = [one for one in nested_values(self._tensors) if is_main_replica(one.replica_id)]
        for one, copy in zip(own, host_copies([one.data for one in own]), strict=True):
            one.data = copy
        # Nothing is left to copy, and torch's loader would wait for the training's kernels.
        self._files.per_thread_copy_ahead = 0

    def plan(self) -> None:
        """Plan what each rank writes where. A collective.

        Raises:
            CheckpointError, ScheduleError: on every rank: the tensors do not fit together.
        """
        plan = agree(self._local_plan, device=self._device)
        rank = dist.get_rank()
        world = dist.get_world_size()
        plans: list[Any] | None = [None] * world if rank == 0 else None
        dist.gather_object(plan, plans)
        agree(lambda: self._make_index(plans), device=self._device)
        # torch numbers the files by a plan's place in this list.
        self._plan = self._files.prepare_global_plan([plan] * world)[rank]

    def write(self) -> None:
        """Write and sync this rank's files. Local; may run on any thread.

        Raises:
            OSError, RuntimeError: a file cannot be written; `folders.writing` translates.
        """
        parts = _split(self._plan.items, self._num_threads)
        try:
            # Daemons: a file system that hangs does not keep the process from ending.
            found = [
                run_on_daemon("megapack-checkpoint", partial(self._write_part, number, part))
                for number, part in enumerate(parts)
            ]
            wait(found)
            self._written = [result for one in found for result in one.result()]
        finally:
            self._tensors = {}
            self._set_up({})

    def abandon(self) -> None:
        """Make `write` on another thread fail at its next tensor."""
        self._planner.abandoned.set()

    def finish(self) -> None:
        """Write the index on rank 0, after every rank has written its files. A collective.

        Raises:
            CheckpointError, ScheduleError: on every rank; the index cannot be written.
        """
        rank = dist.get_rank()
        results: list[Any] | None = [None] * dist.get_world_size() if rank == 0 else None
        dist.gather_object(self._written, results)
        agree(lambda: self._write_index(results), device=self._device)

    def _local_plan(self) -> SavePlan:
        self._set_up(self._state())
        self._files.set_up_storage_writer(dist.get_rank() == 0)
        with writing(self._folder):
            return self._files.prepare_local_plan(self._planner.create_local_plan())

    def _state(self) -> dict[str, Any]:
        flat, _, _ = _replace_state_dict_keys_with_sharded_keys(
            dict(self._tensors), keep_only_main_replica=True
        )
        state: dict[str, Any] = mcore_to_pyt_state_dict(flat)
        return state

    def _set_up(self, state: dict[str, Any]) -> None:
        self._planner.set_up_planner(state, is_coordinator=dist.get_rank() == 0)

    def _make_index(self, plans: list[SavePlan] | None) -> None:
        if plans is not None:
            try:
                _, self._index = self._planner.create_global_plan(plans)
            except ValueError as error:
                raise CheckpointError(
                    f"{self._folder}: the ranks' tensors do not make up the whole model ({error})"
                ) from None

    def _write_part(self, number: int, items: list[WriteItem]) -> list[WriteResult]:
        """Write some tensors into one file.

        On CUDA torch copies the next tensors into pinned memory while it writes one. Its loader
        uses the thread's current device, which is GPU 0 for a new thread.
        """
        # Rank 3's second file is "__3_1.distcp".
        prefix = self._plan.storage_data.prefix.rstrip("_")
        place = dataclasses.replace(self._plan.storage_data, prefix=f"{prefix}_{number}_")
        plan = dataclasses.replace(self._plan, items=items, storage_data=place)
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            written: list[WriteResult] = self._files.write_data(plan, self._planner).value()
        if len(written) != len(items):
            raise RuntimeError(f"{len(written)} of {len(items)} tensors were written")
        return written

    def _write_index(self, results: list[list[WriteResult]] | None) -> None:
        """Write the index, and the two small files that Megatron's reader expects."""
        if results is None or self._index is None:
            return
        with writing(self._folder):
            self._files.finish(self._index, results)
            torch.save({}, self._folder / COMMON_STATE_FNAME)
            save_config(CheckpointingConfig("torch_dist", 1), str(self._folder))


@dataclasses.dataclass(eq=False)
class PendingSave:
    """This rank's part of a save in progress; its thread ends with the work."""

    path: Path
    """The checkpoint's final folder."""
    manifest: Manifest
    """What its manifest will say."""
    writer: StateWriter
    """The tensors' writer."""
    work: Callable[[], None]
    """Writes this rank's files, without communication."""

    def __post_init__(self) -> None:
        self.write_s = 0.0
        self._done = run_on_daemon("megapack-checkpoint", self._timed)

    @property
    def part(self) -> Path:
        """The folder that the files are written into."""
        return part_path(self.path)

    @property
    def is_writing(self) -> bool:
        return not self._done.done()

    @property
    def has_failed(self) -> bool:
        return self._done.done() and self._done.exception() is not None

    def wait(self) -> None:
        """Wait until this rank's files are on the disk; raises the error of writing them."""
        self._done.result()

    def abandon(self) -> None:
        """Stop writing after the tensor in progress."""
        self.writer.abandon()
        # On a file system that hangs, the thread is left behind.
        wait([self._done], timeout=_ABANDON_S)

    def _timed(self) -> None:
        started = time.perf_counter()
        try:
            self.work()
        finally:
            self.write_s = time.perf_counter() - started


class _Planner(MCoreSavePlanner):  # type: ignore[misc]
    """Megatron's planner, which can be stopped from another thread."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.abandoned = threading.Event()

    def resolve_data(self, write_item: WriteItem) -> Any:
        if self.abandoned.is_set():
            raise RuntimeError("the save was abandoned")
        return super().resolve_data(write_item)


def _split(items: Sequence[WriteItem], most: int) -> list[list[WriteItem]]:
    """At most `most` lists of about the same bytes: the largest item first, to the smallest list.

    torch splits by the bytes of whole tensors, not of the parts that the rank writes, and loses
    the error of a thread.
    """
    lists: list[list[WriteItem]] = [[] for _ in range(min(most, len(items)))]
    sizes = [0] * len(lists)
    for item in sorted(items, key=_num_bytes, reverse=True):
        smallest = sizes.index(min(sizes))
        lists[smallest].append(item)
        sizes[smallest] += _num_bytes(item)
    return lists


def _num_bytes(item: WriteItem) -> int:
    data = item.tensor_data
    assert data is not None
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize
