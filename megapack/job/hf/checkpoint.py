"""Export of a checkpoint: its tensors are read one by one, without a model or a layout."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megapack.errors import CheckpointError, ConfigError, one_line
from megapack.job.checkpoint.folders import MANIFEST, Checkpoint, latest_checkpoint, read_checkpoint
from megapack.job.checkpoint.index import check_index
from megapack.job.config.hf_tensors import TOWER
from megapack.job.hf.blocks import Block
from megapack.job.hf.export import SHARD_BYTES, ExportDtype, Exported, Exporter
from megapack.ranks.agree import agree

# The same tensors of the optimizer, of the reference policy and of a critic have other prefixes.
_MODEL = ("embedding.", "decoder.", "mtp.", "output_layer.", TOWER)


def export_checkpoint(
    source: str | Path,
    folder: str | Path,
    *,
    device: torch.device,
    like: str | Path | None = None,
    dtype: ExportDtype | None = None,
    max_shard_bytes: int = SHARD_BYTES,
) -> Exported:
    """Write a checkpoint of `megapack train` as a Hugging Face folder, whole or not at all.

    A collective of all ranks, each of which writes a part; one process is enough. Memory: the
    largest tensor twice.

    Args:
        source: a checkpoint, or a run, whose latest one is taken.
        like: the folder that the run started from; None: its `model.hf_path`.
        folder, device, dtype, max_shard_bytes: see `export_hf`.

    Raises:
        ConfigError, CheckpointError, ScheduleError: on every rank; there is no folder then.
    """
    found = agree(lambda: _find(Path(source)), device=device)
    original = agree(lambda: _original(found, like), device=device)
    tensors = agree(lambda: CheckpointTensors(found.path / "state"), device=device)
    exporter = Exporter(Path(folder), original, dtype, max_shard_bytes, device)
    return exporter.export(tensors.sources())


def _find(source: Path) -> Checkpoint:
    if (source / MANIFEST).exists():
        return read_checkpoint(source)
    found = latest_checkpoint(source / "checkpoints")
    if found is None:
        raise CheckpointError(
            f"{source} is neither a checkpoint nor a run's folder with a complete one"
        )
    return found


def _original(checkpoint: Checkpoint, like: str | Path | None) -> Path:
    """The folder that the run started from."""
    model = checkpoint.manifest.config.get("model", {})
    path = model.get("hf_path") if like is None else like
    if path is None:
        raise ConfigError(
            f"{checkpoint.path} is of a run from random weights (model.hf_path=null), of which "
            "Hugging Face has no config; runs that start from model.hf_path can be exported"
        )
    if not Path(path).is_dir():
        raise ConfigError(
            f"the folder {path}, which {checkpoint.path} started from, is not here; give its place "
            "with --like"
        )
    return Path(path)


class CheckpointTensors:
    """A checkpoint's tensors of the model, each as one block.

    Args:
        folder: the checkpoint's `state`.

    Raises:
        CheckpointError: the index cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        check_index(folder)
        self.folder = folder
        self._reader = FileSystemReader(folder)
        index = self._reader.read_metadata()
        self._reader.set_up_storage_reader(index, is_coordinator=True)
        self._entries = {
            key: entry
            for key, entry in index.state_dict_metadata.items()
            if key.startswith(_MODEL) and isinstance(entry, TensorStorageMetadata)
        }
        # Query, key and value projections are one tensor, of which each takes its rows.
        self._last: tuple[Block, Tensor] | None = None

    def sources(self) -> dict[Block, Callable[[], Tensor]]:
        """How to read each block."""
        return {block: functools.partial(self.read, block) for block in self._blocks()}

    def _blocks(self) -> Iterator[Block]:
        for key, entry in self._entries.items():
            sizes = tuple(entry.size)
            indices: list[tuple[int, ...]] = [()]
            if ".experts.experts." in key:
                indices = [(expert,) for expert in range(sizes[0])]
                sizes = sizes[1:]
            for index in indices:
                yield Block(
                    key=key,
                    index=index,
                    start=(0,) * len(sizes),
                    shape=sizes,
                    whole=sizes,
                    dtype=entry.properties.dtype,
                )

    def read(self, block: Block) -> Tensor:
        """A block's values.

        Raises:
            CheckpointError: they cannot be read.
        """
        if self._last is not None and self._last[0] == block:
            return self._last[1]
        self._last = None
        ones = (1,) * len(block.index)
        values = torch.empty((*ones, *block.shape), dtype=block.dtype)
        place = ChunkStorageMetadata(
            offsets=torch.Size((*block.index, *block.start)), sizes=values.shape
        )
        items = create_read_items_for_chunk_list(block.key, self._entries[block.key], [place])
        if sum(math.prod(item.lengths) for item in items) != values.numel():
            raise CheckpointError(f"{self.folder} lacks parts of {block.key}; export another one")
        try:
            self._reader.read_data(LoadPlan(items), _Into(values)).wait()
        except Exception as error:  # a damaged file raises anything
            raise CheckpointError(
                f"{self.folder} cannot be read ({type(error).__name__}: {one_line(error)[:120]}); "
                "export another checkpoint"
            ) from error
        values = values.view(block.shape)
        self._last = block, values
        return values


class _Into(DefaultLoadPlanner):
    """Puts what torch reads into one tensor; the plan is made already."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self._values = values

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        part = self._values
        for dim, (start, size) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            part = part.narrow(dim, start, size)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass
