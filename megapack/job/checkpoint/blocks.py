"""The distributed optimizer's state as blocks of the whole model's tensors; no rank gathers it.

Megatron's distributed optimizer flattens the parameters of a bucket into one buffer and gives each
data-parallel rank an equal slice of it. Cut by rows, a slice of a parameter is a few rectangular
blocks, and the checkpoint's format stores any blocks that cover a tensor. So each rank writes the
blocks of its slices and reads the blocks that it needs, without communication:

    rank 0: elements 0 to 6 of a [3, 4] tensor -> row 0, and 2 elements of row 1
    rank 1: elements 6 to 12                   -> 2 elements of row 1, and row 2

Megatron's own formats gather a whole data-parallel group's state on one rank or on all, or do not
load on another tp or pp. Their names of tensors are used here, so both load each other's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

from megapack.errors import CheckpointError

Block = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a rectangular part of a tensor."""


def own_blocks(optimizer: Any, model: Mapping[str, Any]) -> Iterator[ShardedTensor]:
    """The state that this rank holds of Megatron's distributed optimizer, as views of it.

    Args:
        optimizer: one whose state has been allocated.
        model: the sharded state dict of this rank's chunks, whose tensors are the parameters.

    Raises:
        CheckpointError: a parameter is saved in another shape than slices of its elements.
    """
    named = {id(one.data): one for one in nested_values(dict(model))}
    mains = _main_slices(optimizer)
    for param, start, end in _slices(optimizer):
        main = mains[param]
        values = {"param": main, **optimizer.optimizer.state[main]}
        # Adam's count of updates has no elements to slice; it follows from the manifest.
        values.pop("step", None)
        for part, offset in _parts(named[id(param)]):
            for name, value in values.items():
                yield from _blocks_of(part, offset, name, value.detach(), start, end)


def flat_blocks(shape: Sequence[int], start: int, end: int) -> list[Block]:
    """The blocks that hold elements `start` to `end` of a tensor in row-major order.

    The blocks are in order, and each is contiguous in the slice. A slice of [3, 4] from 2 to 12 is
    2 elements of row 0 and then rows 1 and 2: offsets (0, 2) with sizes (1, 2), and (1, 0) with
    (2, 4).
    """
    if start >= end:
        return []
    if len(shape) < 2:
        return [((start,), (end - start,))] if shape else [((), ())]
    row = math.prod(shape[1:])
    first_whole = -(-start // row)
    end_whole = end // row
    if first_whole > end_whole:
        return _in_row(shape, start // row, start % row, end % row)
    blocks = _in_row(shape, first_whole - 1, start % row, row) if start % row else []
    if first_whole < end_whole:
        zeros = (0,) * (len(shape) - 1)
        blocks.append(((first_whole, *zeros), (end_whole - first_whole, *shape[1:])))
    return blocks + _in_row(shape, end_whole, 0, end % row)


def _in_row(shape: Sequence[int], index: int, start: int, end: int) -> list[Block]:
    inner = flat_blocks(shape[1:], start, end)
    return [((index, *offsets), (1, *sizes)) for offsets, sizes in inner]


def _slices(optimizer: Any) -> Iterator[tuple[Tensor, int, int]]:
    """The parameters of which this rank holds a part, and the part's elements."""
    for buffer in optimizer.gbuf_ranges:
        for buckets in buffer.values():
            for bucket in buckets:
                for param, ranges in bucket["param_map"].items():
                    yield param, ranges["param"].start, ranges["param"].end


def _main_slices(optimizer: Any) -> dict[Tensor, Tensor]:
    """The fp32 slice that Adam updates, of each parameter of which this rank holds a part.

    Megatron's own look-up counts parameters in the order of the buffers. In a group of bf16 and
    fp32 parameters (a value head) Adam's order is another, so it would find the wrong one.
    """
    return {
        param: main
        for params, mains in (
            (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
            (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
        )
        for group, main_group in zip(params, mains, strict=True)
        for param, main in zip(group, main_group, strict=True)
    }


def _parts(saved: ShardedTensor | ShardedTensorFactory) -> list[tuple[ShardedTensor, int]]:
    """The tensors that a parameter is saved as, each with its first element's index in it.

    Most are saved as they are. SwiGLU's gate and up projections are one parameter but two tensors.
    """
    if isinstance(saved, ShardedTensor):
        return [(saved, 0)]
    whole = torch.empty(saved.data.shape, dtype=saved.data.dtype, device="meta")
    built = dataclasses.replace(saved, data=whole).build()
    parts = [(part, part.data.storage_offset()) for part in nested_values({"parts": built})]
    if any(part.data._base is not whole or not part.data.is_contiguous() for part, _ in parts):
        raise CheckpointError(
            f"the optimizer state of {saved.key} cannot be saved in slices; set "
            "optim.distributed_optimizer=false"
        )
    return parts


def _blocks_of(
    part: ShardedTensor, offset: int, name: str, value: Tensor, start: int, end: int
) -> Iterator[ShardedTensor]:
    """The blocks of a slice of a parameter in one of its tensors.

    Args:
        part, offset: returned by `_parts`.
        name: of the optimizer's value.
        value: the slice's values.
        start, end: the slice's elements in the parameter.
    """
    begin = max(start, offset)
    stop = min(end, offset + math.prod(part.local_shape))
    place = begin - start
    ones = (1,) * part.prepend_axis_num
    corner = part.global_offset[part.prepend_axis_num :]
    for offsets, sizes in flat_blocks(part.local_shape, begin - offset, stop - offset):
        numel = math.prod(sizes)
        yield ShardedTensor(
            key=f"optimizer.state.{name}.{part.key}",
            data=value[place : place + numel].view(*ones, *sizes),
            dtype=value.dtype,
            local_shape=(*ones, *sizes),
            global_shape=part.global_shape,
            global_offset=(
                *part.global_offset[: part.prepend_axis_num],
                *(a + b for a, b in zip(corner, offsets, strict=True)),
            ),
            axis_fragmentations=None,
            # The parameter's replicas over tp write nothing; those over dp hold other slices.
            replica_id=(*part.replica_id[:2], 0),
            allow_shape_mismatch=part.allow_shape_mismatch,
        )
        place += numel
