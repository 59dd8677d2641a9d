"""Which rank writes which tensor into which file, and from which ranks it gets the parts.

Every rank makes the same plan from all ranks' blocks.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch

from megapack.errors import ConfigError
from megapack.job.hf.blocks import Block, RowSpan, hf_shapes, row_spans
from megapack.job.hf.names import TensorNames
from megapack.job.hf.shards import file_names


@dataclasses.dataclass(frozen=True)
class Part:
    """Rows of a tensor, and the rank that supplies them."""

    block: Block
    span: RowSpan
    holder: int


@dataclasses.dataclass(frozen=True)
class Target:
    """A tensor to write."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    writer: int
    """The rank that writes it."""
    parts: tuple[Part, ...]
    """None for a tensor that is copied from the folder that the model was loaded from."""
    file: str = ""

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class ExportPlan:
    """All tensors in the order in which they are written.

    The order interleaves the writers, so that they write at the same time. Each rank sends and
    receives in this one order, so no two wait for each other.
    """

    targets: list[Target]

    @property
    def weight_map(self) -> dict[str, str]:
        """The file of each tensor."""
        return {target.name: target.file for target in self.targets}

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(target.num_bytes for target in self.targets)

    def of_file(self, file: str) -> list[Target]:
        """A file's tensors in order."""
        return [target for target in self.targets if target.file == file]


def plan_export(
    blocks_by_rank: Sequence[Sequence[Block]],
    names: TensorNames,
    dtype_of: Callable[[str, torch.dtype], torch.dtype],
    max_shard_bytes: int,
    kept: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = MappingProxyType({}),
) -> ExportPlan:
    """Spread the tensors over the ranks that hold most of them.

    Args:
        blocks_by_rank: all ranks' blocks.
        dtype_of: the type to write, from the Hugging Face name and the block's type.
        max_shard_bytes: a file holds at most this many bytes, or one tensor.
        kept: shapes and types of tensors that are copied if they are not the model's.

    Raises:
        ConfigError: the ranks' blocks do not make up a whole tensor, or it has no name.
    """
    holders: dict[Block, list[int]] = defaultdict(list)
    for rank, blocks in enumerate(blocks_by_rank):
        for block in dict.fromkeys(blocks):
            holders[block].append(rank)
    wholes: dict[tuple[str, tuple[int, ...]], list[Block]] = defaultdict(list)
    for block in holders:
        wholes[block.key, block.index].append(block)
    # Several of Megatron's tensors may be parts of one in the folder.
    together: dict[tuple[str, ...], list[Block]] = defaultdict(list)
    for parts in wholes.values():
        _check_whole(parts)
        together[tuple(hf_shapes(parts[:1], names))] += parts
    load = [0] * len(blocks_by_rank)
    by_writer: dict[int, list[Target]] = defaultdict(list)
    for parts in together.values():
        writer = _writer(parts, holders, load)
        load[writer] += sum(block.num_bytes for block in parts)
        by_writer[writer] += _targets(parts, holders, names, dtype_of, writer)
    own = {one.name for targets in by_writer.values() for one in targets}
    for name, (shape, dtype) in kept.items():
        if name in own:
            continue
        writer = load.index(min(load))
        one = Target(name, shape, dtype_of(name, dtype), writer, ())
        load[writer] += one.num_bytes
        by_writer[writer].append(one)
    return ExportPlan(_in_order(by_writer, max_shard_bytes))


def _check_whole(blocks: list[Block]) -> None:
    """Check that blocks cover their tensor; they do not overlap, because equal ones are one."""
    held = sum(torch.Size(block.shape).numel() for block in blocks)
    whole = torch.Size(blocks[0].whole).numel()
    if held != whole:
        raise ConfigError(
            f"the ranks hold {held} of the {whole} numbers of {blocks[0].key}"
            f"{list(blocks[0].index) or ''}; export from a checkpoint of the run instead"
        )


def _writer(blocks: list[Block], holders: dict[Block, list[int]], load: list[int]) -> int:
    """Of the ranks that hold most of a tensor, the one that has least to write."""
    held: dict[int, int] = defaultdict(int)
    for block in blocks:
        for rank in holders[block]:
            held[rank] += block.num_bytes
    most = max(held.values())
    return min((rank for rank in held if held[rank] == most), key=lambda rank: (load[rank], rank))


def _targets(
    blocks: list[Block],
    holders: dict[Block, list[int]],
    names: TensorNames,
    dtype_of: Callable[[str, torch.dtype], torch.dtype],
    writer: int,
) -> list[Target]:
    parts: dict[str, list[Part]] = defaultdict(list)
    for block in blocks:
        # The nearest rank: tensor-parallel ranks are neighbours, replicas are on other nodes.
        holder = min(holders[block], key=lambda rank: (abs(rank - writer), rank))
        for span in row_spans(block, names):
            parts[span.name].append(Part(block, span, holder))
    return [
        Target(one, shape, dtype_of(one, blocks[0].dtype), writer, tuple(parts[name]))
        for name, shape in hf_shapes(blocks, names).items()
        for one in (name, *names.copies(name))
    ]


def _in_order(by_writer: dict[int, list[Target]], max_shard_bytes: int) -> list[Target]:
    files: list[list[Target]] = []
    for writer in sorted(by_writer):
        # Wider types first: readers need a tensor's bytes at a multiple of its type's width.
        targets = sorted(by_writer[writer], key=lambda target: -target.dtype.itemsize)
        files += _split(targets, max_shard_bytes)
    placed: list[tuple[int, int, Target]] = []
    written: dict[int, int] = defaultdict(int)
    for targets, file in zip(files, file_names(len(files)), strict=True):
        for target in targets:
            placed.append(
                (written[target.writer], target.writer, dataclasses.replace(target, file=file))
            )
            written[target.writer] += target.num_bytes
    return [target for _, _, target in sorted(placed, key=lambda item: item[:2])]


def _split(targets: list[Target], most: int) -> list[list[Target]]:
    """Consecutive lists of at most `most` bytes, or of one tensor."""
    lists: list[list[Target]] = []
    size = 0
    for target in targets:
        if not lists or size + target.num_bytes > most:
            lists.append([])
            size = 0
        lists[-1].append(target)
        size += target.num_bytes
    return lists
