"""The blocks of the whole model's tensors that a rank holds, and their rows in a folder.

Megatron says of each parameter of a rank which block of which tensor of the whole model it is,
whatever the layout, and whether layers are Transformer Engine's or local, experts grouped or one by
one. So loading and exporting read this alone and know no layout.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from megapack.job.hf.names import HEAD, Rows, TensorNames
from megapack.model.sharded import saved_blocks

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Block:
    """A rectangular part of a tensor of the whole model; a description without values."""

    key: str
    """Megatron's name of the tensor in the whole model."""
    index: tuple[int, ...]
    """The expert's number, if the tensor is one of a layer's experts; else empty."""
    start: tuple[int, ...]
    """The block's first row, and first column if the tensor has columns."""
    shape: tuple[int, ...]
    """The block's sizes."""
    whole: tuple[int, ...]
    """The whole tensor's sizes."""
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the block's values."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class RowSpan(Rows):
    """Rows of a Hugging Face tensor that are rows of a block.

    Where halves of columns are swapped, the block has all columns.
    """

    block_row: int = 0
    """The block's first of these rows."""
    columns: tuple[slice, ...] = ()
    """The block's columns in the Hugging Face tensor; empty for a vector."""

    @property
    def place(self) -> tuple[int | slice, ...]:
        """Where the span is in the Hugging Face tensor; between its rows may be others."""
        rows = slice(self.start, self.start + self.step * (self.count - 1) + 1)
        place = (*self.columns, rows) if self.is_transposed else (rows, *self.columns)
        return place if self.expert is None else (self.expert, *place)

    def rows_in(self, part: Tensor) -> Tensor:
        """The span's rows in what is at its place, as the block has them; a view."""
        rows = part.t() if self.is_transposed else part
        return rows[:: self.step]

    def of(self, values: Tensor) -> Tensor:
        """The span's part of its block's values."""
        return values[self.block_row : self.block_row + self.count]

    def arranged(self, values: Tensor) -> Tensor:
        """The span's values with columns in the order of the other side: Megatron's or the
        folder's."""
        return values.roll(values.shape[1] // 2, 1) if self.swaps_halves else values


def row_spans(block: Block, names: TensorNames) -> list[RowSpan]:
    """The Hugging Face rows that a block holds; none for rows of the padded vocabulary.

    Raises:
        ConfigError: see `TensorNames.rows`.
    """
    first = block.start[0]
    end = first + block.shape[0]
    columns = tuple(
        slice(start, start + size)
        for start, size in zip(block.start[1:], block.shape[1:], strict=True)
    )
    found = []
    at = 0
    for rows in names.rows(block.key, block.index, block.whole[0]):
        begin = max(first, at)
        stop = min(end, at + rows.count)
        if begin < stop:
            own = dataclasses.replace(
                rows, start=rows.start + rows.step * (begin - at), count=stop - begin
            )
            found.append(RowSpan(**vars(own), block_row=begin - first, columns=columns))
        at += rows.count
    return found


def hf_shapes(blocks: Iterable[Block], names: TensorNames) -> dict[str, tuple[int, ...]]:
    """The Hugging Face tensors of which blocks are parts, with their whole shapes.

    A tensor whose parts are several of Megatron's needs a block of each.
    """
    counts: dict[tuple[str, int | None], int] = defaultdict(int)
    columns: dict[str, tuple[int, ...]] = {}
    stacked: dict[str, int] = {}
    transposed = set()
    for key, index, whole in dict.fromkeys((b.key, b.index, b.whole) for b in blocks):
        for rows in names.rows(key, index, whole[0]):
            counts[rows.name, rows.expert] += rows.count
            columns[rows.name] = whole[1:]
            stacked[rows.name] = rows.num_stacked
            if rows.is_transposed:
                transposed.add(rows.name)
    shapes = {}
    for (name, expert), count in counts.items():
        experts = () if expert is None else (stacked[name],)
        matrix = (count, *columns[name])
        shapes[name] = (*experts, *(matrix[::-1] if name in transposed else matrix))
    return shapes


def own_blocks(chunks: Sequence[Any]) -> Iterator[tuple[Block, Tensor]]:
    """This rank's blocks, each with its values as a view of the parameter or buffer."""
    for chunk in chunks:
        for part in saved_blocks(chunk):
            yield _block(part), part.data.detach()


def _block(part: ShardedTensor) -> Block:
    leading = part.prepend_axis_num
    return Block(
        key=part.key,
        index=tuple(part.global_offset[:leading]),
        start=tuple(part.global_offset[leading:]),
        shape=tuple(part.local_shape),
        whole=tuple(part.global_shape[leading:]),
        dtype=part.dtype,
    )


def is_value_head(block: Block) -> bool:
    """Whether it is (part of) an output layer of one row."""
    return block.key == HEAD and block.whole[0] == 1


def gather_distinct(value: T) -> list[T]:
    """Every rank's value, a small one, in the order of the ranks; a collective.

    Data-parallel ranks hold the same blocks of the model. So of ranks with equal values only the
    first sends its own: with dp32, 1/32 of the bytes.
    """
    if not dist.is_initialized():
        return [value]
    digest = hashlib.sha256(repr(value).encode()).digest()
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest)
    firsts = {each: digests.index(each) for each in digests}
    is_first = firsts[digest] == dist.get_rank()
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value if is_first else None)
    return [values[firsts[each]] for each in digests]
