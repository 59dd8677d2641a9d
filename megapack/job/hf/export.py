"""Weights out of a model's chunks or of a checkpoint, into a folder that transformers loads.

Each tensor is written by one rank that holds it, or most of it; the other parts are sent to that
rank one by one. No rank holds more than its share of the model and one tensor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megapack.job.checkpoint.folders import part_path
from megapack.job.hf import output
from megapack.job.hf.blocks import Block, gather_distinct, is_value_head, own_blocks
from megapack.job.hf.export_plan import ExportPlan, Part, Target, plan_export
from megapack.job.hf.folder import HfFolder
from megapack.job.hf.load import check_tensors, names_of
from megapack.job.hf.names import VALUE_HEAD
from megapack.job.hf.shards import DTYPES, ShardWriter, write_index
from megapack.model.overlap import finish_param_gathers
from megapack.ranks.agree import agree

SHARD_BYTES = 5_000_000_000
"""Bytes of the largest file, as transformers has it."""

ExportDtype = Literal["bf16", "fp32"]
_TORCH = {"bf16": torch.bfloat16, "fp32": torch.float32}
Sources = Mapping[Block, Callable[[], Tensor]]
"""How a rank gets the values of each block that it holds."""


@dataclasses.dataclass(frozen=True)
class Exported:
    """A complete export; prints as one line."""

    folder: Path
    num_tensors: int
    num_bytes: int
    """Bytes of all tensors."""
    num_files: int
    """Files of tensors."""
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.folder}: {self.num_tensors} tensors, {self.num_bytes / 1e6:,.0f} MB in "
            f"{self.num_files} files, {self.seconds:.1f} s"
        )


def export_hf(
    chunks: Sequence[Any],
    folder: str | Path,
    *,
    like: str | Path,
    device: torch.device,
    dtype: ExportDtype | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    replace: bool = False,
) -> Exported:
    """Write the model as a Hugging Face folder, whole or not at all; a collective of all ranks.

        export_hf(chunks, "models/trained", like="models/Qwen3-0.6B", device=device)

    Args:
        chunks: this rank's GPT chunks, and its tower if it has one, in DDP or not. Without a tower
            that of `like` is copied.
        folder: to write, on a disk that all ranks see. It is `FOLDER.part` until it is complete.
        like: the folder of the initial model, for names, config and tokenizer.
        device: the device of the collectives, as `launch.start` returns it.
        dtype: of the weights; None: each tensor's in `like`. An expert bias keeps its type.
        max_shard_bytes: most bytes of a file with several tensors.
        replace: replace a folder of that name.

    Raises:
        ConfigError, CheckpointError, ScheduleError: on every rank; there is no folder then.
    """
    finish_param_gathers(chunks)
    held = agree(
        lambda: {block: in_memory(data) for block, data in own_blocks(chunks)}, device=device
    )
    exporter = Exporter(Path(folder), Path(like), dtype, max_shard_bytes, device)
    return exporter.export(held, replace=replace)


def in_memory(values: Tensor) -> Callable[[], Tensor]:
    """How to get values that are there."""
    return lambda: values


@dataclasses.dataclass
class Exporter:
    """Writes blocks, wherever they come from, into a folder; fields are those of `export_hf`."""

    folder: Path
    like: Path
    dtype: ExportDtype | None
    max_shard_bytes: int
    device: torch.device

    def __post_init__(self) -> None:
        self.folder = output.target(self.folder)
        self._rank = dist.get_rank() if dist.is_initialized() else 0

    def export(self, sources: Sources, *, replace: bool = False) -> Exported:
        """Write the blocks of all ranks; a collective."""
        started = time.perf_counter()
        stored = agree(lambda: HfFolder(self.like), device=self.device)
        plan = self._plan(sources, stored)
        try:
            self._on_first_rank(self._open, plan, replace)
            agree(lambda: self._write(plan, sources, stored), device=self.device)
            self._on_first_rank(self._finish, plan, replace)
        except BaseException:
            if self._rank == 0:
                output.abandon(self.folder)
            raise
        return Exported(
            folder=self.folder,
            num_tensors=len(plan.targets),
            num_bytes=plan.num_bytes,
            num_files=len(set(plan.weight_map.values())),
            seconds=time.perf_counter() - started,
        )

    def _on_first_rank(self, work: Callable[..., None], *args: Any) -> None:
        def local() -> None:
            if self._rank == 0:
                with output.writing(self.folder):
                    work(*args)

        agree(local, device=self.device)

    def _plan(self, sources: Sources, stored: HfFolder) -> ExportPlan:
        blocks = gather_distinct(list(sources))
        return agree(lambda: self._planned(blocks, stored), device=self.device)

    def _planned(self, blocks: Sequence[Sequence[Block]], stored: HfFolder) -> ExportPlan:
        """The plan for all ranks' blocks."""
        output.small_files(self.like)
        every = [block for own in blocks for block in own]
        is_value_model = any(is_value_head(block) for block in every)
        keys = (block.key for block in every)
        names = names_of(stored, keys, is_value_model=is_value_model)
        dtype_of = functools.partial(self._dtype_of, stored)
        kept = {
            name: (one.shape, DTYPES[one.dtype])
            for name, one in stored.tensors.items()
            if names.is_kept(name)
        }
        plan = plan_export(blocks, names, dtype_of, self.max_shard_bytes, kept)
        check_tensors({target.name: target.shape for target in plan.targets}, stored, names)
        return plan

    def _dtype_of(self, stored: HfFolder, name: str, own: torch.dtype) -> torch.dtype:
        """The type in which a tensor is written."""
        found = stored.tensors.get(name)
        if self.dtype is None or name.endswith("e_score_correction_bias"):
            return own if found is None else DTYPES[found.dtype]
        return _TORCH[self.dtype]

    def _open(self, plan: ExportPlan, replace: bool) -> None:
        output.check_free(self.folder, replace=replace)
        output.check_apart(self.folder, self.like)
        output.open_part(self.folder)
        output.check_space(self.folder, plan.num_bytes)

    def _write(self, plan: ExportPlan, sources: Sources, stored: HfFolder) -> None:
        """Write this rank's tensors, and send what others write.

        After an error this rank goes on to send and receive: the others would wait for it.
        """
        error: Exception | None = None
        file: ShardWriter | None = None
        try:
            for one in plan.targets:
                values = self._collect(one, sources)
                if values is None or error is not None:
                    continue
                try:
                    if not one.parts:
                        values.copy_(stored.read(one.name))
                    with output.writing(self.folder):
                        path = part_path(self.folder) / one.file
                        # A rank's files come one after another; each is closed when it is whole.
                        if file is None or file.path != path:
                            file = ShardWriter(path, plan.of_file(one.file))
                        file.write(one.name, values)
                except Exception as caught:  # raised below, after the last tensor
                    error = caught
        finally:
            with contextlib.suppress(OSError):
                if file is not None:
                    file.close()
        if error is not None:
            raise error

    def _collect(self, one: Target, sources: Sources) -> Tensor | None:
        """A tensor's values on the rank that writes it; the others send their parts.

        Those of a tensor without parts are for the caller to fill in.
        """
        if one.writer != self._rank:
            for part in one.parts:
                if part.holder == self._rank:
                    dist.send(part.span.of(sources[part.block]()).contiguous(), one.writer)
            return None
        whole = torch.empty(one.shape, dtype=one.dtype)
        for part in one.parts:
            values = part.span.arranged(self._values(part, sources))
            part.span.rows_in(whole[part.span.place]).copy_(values)
        return whole

    def _values(self, part: Part, sources: Sources) -> Tensor:
        if part.holder == self._rank:
            return part.span.of(sources[part.block]())
        shape = (part.span.count, *part.block.shape[1:])
        values = torch.empty(shape, dtype=part.block.dtype, device=self.device)
        dist.recv(values, part.holder)
        return values

    def _finish(self, plan: ExportPlan, replace: bool) -> None:
        """Write the small files and give the folder its name."""
        part = part_path(self.folder)
        write_index(part, plan.weight_map, plan.num_bytes)
        output.copy_small_files(self.like, self.folder)
        dtype = None if self.dtype is None else str(_TORCH[self.dtype]).removeprefix("torch.")
        is_value_model = VALUE_HEAD in plan.weight_map
        output.write_config(self.like, self.folder, dtype=dtype, is_value_model=is_value_model)
        output.finish(self.folder, replace=replace)
