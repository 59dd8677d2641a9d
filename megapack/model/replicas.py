"""Weights that several ranks hold are compared, bit by bit, before a run trains on them.

Data- and context-parallel ranks hold the same weights; tensor-parallel ranks the same norms,
routers and other weights that are not split; the first and the last stage the same tied embedding.
Training does not notice copies that differ: each rank's gradients are those of its own copy, the
loss falls, and a checkpoint keeps one of the copies.

Which ranks hold the same is read from what Megatron saves in a checkpoint: of each tensor of a
rank, which block of which tensor of the whole model it is. The marks by which DDP, the optimizer
and the initial weights tell a split weight from a whole one are not read: they may be what is
wrong.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from megapack.errors import ScheduleError, brief, of_all_ranks
from megapack.model.parameters import local_name
from megapack.model.sharded import saved_blocks
from megapack.ranks.agree import agree

# Bytes that are mixed at a time, in two buffers of this size.
_PART_BYTES = 1 << 24
# Odd 64-bit numbers with bits in no regular order, as signed ones: multiples of the first tell
# positions apart, and a product with the second carries each bit to the bits above it.
_STRIDE = -0x61C8864680B583EB
_FACTOR = -0x40A7B892E31B1A47


def check_replicas(chunks: Sequence[Any], *, device: torch.device) -> None:
    """Compare the weights of ranks that should hold the same ones; a collective of all ranks.

        load_my_weights(chunks)
        check_replicas(chunks, device=device)

    Saved buffers are compared, too. Call it once the weights are drawn or loaded, before the first
    optimizer step: after one, `overlap_param_gather` leaves old values in the weights. It reads
    each weight once; the ranks then gather 16 bytes for each tensor. Weights that Transformer
    Engine keeps in FP8 are left out.

    Args:
        chunks: this rank's GPT models, wrapped in DDP or not.
        device: the device of the collectives, as `launch.start` returns it.

    Raises:
        ScheduleError: on every rank: a tensor differs. It names the tensor and ranks, and counts
            how many others differ.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    names, table = agree(lambda: _own_table(chunks, device), device=device)
    num_rows = torch.tensor(len(names), device=device)
    dist.all_reduce(num_rows, op=dist.ReduceOp.MAX)
    # Ranks hold different numbers of tensors: rows of zeros, which are equal, fill the tables.
    padded = table.new_zeros(int(num_rows), 2)
    padded[: len(names)] = table
    tables = table.new_empty(dist.get_world_size() * len(padded), 2)
    dist.all_gather_into_tensor(tables, padded)
    keys, digests = tables.cpu().unbind(1)
    differing = _differing(keys, digests)
    if differing.numel():
        _raise_difference(names, keys, digests, differing)


@torch.no_grad()
def _own_table(chunks: Sequence[Any], device: torch.device) -> tuple[list[str], Tensor]:
    """The names of this rank's blocks, and int64 [blocks, 2]: the digests of name and values."""
    parts = [part for chunk in chunks for part in saved_blocks(chunk)]
    # A subclass of Tensor is an FP8 weight: values and scales, of which there is no one view.
    parts = [part for part in parts if type(part.data.detach()) is Tensor]
    names = [_name(part) for part in parts]
    rows = [[_key(name), 0] for name in names]
    table = torch.tensor(rows, dtype=torch.int64).view(-1, 2).to(device)
    for row, part in zip(table, parts, strict=True):
        row[1] = values_digest(part.data.detach())
    return names, table


def _name(part: ShardedTensor) -> str:
    """The block's tensor in the whole model, and its place there if it is not all of it."""
    leading = part.prepend_axis_num
    starts = part.global_offset
    sizes = (*[1] * leading, *part.local_shape)
    if sizes == part.global_shape:
        return local_name(part.key)
    place = [f"{start}:{start + size}" for start, size in zip(starts, sizes, strict=True)]
    return f"{local_name(part.key)}[{', '.join(place)}]"


def _key(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big", signed=True)


def values_digest(values: Tensor) -> Tensor:
    """int64 scalar on the tensor's device, from its bits and their places; no wait for the device.

    Each 8 bytes are mixed with their place, and the results added modulo 2**64, which gives the
    same in any order. Two tensors of the same size that differ have the same digest with a
    probability of about 2**-64, also if values are only exchanged.
    """
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    raw = values.reshape(-1).view(torch.uint8)
    for start in range(0, raw.numel(), _PART_BYTES):
        words = _words(raw[start : start + _PART_BYTES])
        first = start // 8
        mixed = torch.arange(first, first + words.numel(), device=values.device)
        mixed.mul_(_STRIDE).add_(words)
        mixed.bitwise_xor_(mixed >> 32)
        mixed.mul_(_FACTOR)
        mixed.bitwise_xor_(mixed >> 29)
        total += mixed.sum()
    return total


def _words(raw: Tensor) -> Tensor:
    """Bytes as int64: a view, or a copy filled up with zeros if they do not begin or end at one."""
    if raw.numel() % 8 or raw.storage_offset() % 8:
        raw = torch.nn.functional.pad(raw, (0, -raw.numel() % 8))
    return raw.view(torch.int64)


def _differing(keys: Tensor, digests: Tensor) -> Tensor:
    """The keys that have more than one digest."""
    order = keys.argsort()
    keys = keys[order]
    digests = digests[order]
    differs = (keys[1:] == keys[:-1]) & (digests[1:] != digests[:-1])
    found: Tensor = keys[1:][differs].unique()  # type: ignore[no-untyped-call]
    return found


def _raise_difference(names: list[str], keys: Tensor, digests: Tensor, differing: Tensor) -> None:
    """Raise the same error on every rank, about the first rank's first tensor that differs."""
    world = dist.get_world_size()
    num_rows = len(keys) // world
    holder, row = divmod(int(torch.isin(keys, differing).nonzero()[0]), num_rows)
    name = names[row] if dist.get_rank() == holder else ""
    reported: list[Any] = [name]
    dist.broadcast_object_list(reported, src=holder)
    rows = (keys == keys[holder * num_rows + row]).nonzero().flatten().tolist()
    copies = [(row // num_rows, int(digests[row])) for row in rows]
    ((common, count), *_) = Counter(digest for _, digest in copies).most_common()
    others = [rank for rank, digest in copies if digest != common]
    raise of_all_ranks(
        ScheduleError(
            f"{reported[0]} must be equal on {len(copies)} ranks, but ranks {brief(others)} differ "
            f"from the other {count}; {len(differing)} of the shared tensors differ. Draw weights "
            "from one seed, or load them from one checkpoint, on all ranks"
        )
    )
