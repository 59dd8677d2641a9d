"""A small object of each rank, on all ranks; equal objects travel once."""

from __future__ import annotations

import hashlib
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def gather_distinct(value: T) -> list[T]:
    """Every rank's value, in the order of the ranks; a collective.

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
