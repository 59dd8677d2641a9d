"""Gathered keys: attention over shared prefixes and earlier pieces with kernels that know of
sequences only.

Each of a row's sequences (`prefixes.sequences`) has a path: those that it continues, from the first
on, and itself. Its queries have the keys on it. A key on several paths is gathered as often. The
backward of the gather adds their gradients up. The last query of a sequence sees its last key.

Keys that a row carries are before its own (see `carried`): the branches of its pieces continue
them.

With a sliding window a sequence needs only the keys of its queries' windows. A kernel that knows no
windows gets shorter sequences, blocks of queries: the window's length w of queries and less than
2 w keys each, so that its work is linear in the length of a sample.

Shape suffix: K gathered keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megapack.prefixes import EARLIER, Branch
from megapack.rows.slices import assembly_order


@dataclass(frozen=True, kw_only=True)
class Paths:
    """The sequences of a rank's queries, in their order, and the keys of each."""

    num_queries: list[int]
    num_keys: list[int]
    """At least as many as queries."""
    order_K: Tensor
    """int64: index of each key; with context parallelism in the concatenated slices of all ranks
    (see `rows.slices`), else in the row."""
    query_ends: Tensor
    """int32: where the queries of each sequence begin; the last is the end of all."""
    key_ends: Tensor
    """int32: where the keys of each sequence begin; the last is the end of all."""


def key_paths(
    padded_lengths: Sequence[int],
    branches: Sequence[Branch],
    *,
    carried: Sequence[int] = (),
    cp: int = 1,
    cp_rank: int = 0,
    window: int | None = None,
    max_queries: int | None = None,
) -> Paths:
    """The sequences of one context-parallel rank: branches, with cp > 1 the parts that it holds.

    Args:
        padded_lengths: tokens of each sequence of the row, and of its dummies.
        branches: the row's sequences; () if samples are whole and share nothing.
        carried: padded tokens that each earlier row has kept.
        cp: number of context-parallel ranks.
        cp_rank: this rank among them.
        window: keys that a query sees, its own and those before it; None = all.
        max_queries: longer sequences are cut into such blocks; None = they are not.

    A prefix of 2 tokens, continued by 3 and by 2 tokens:

    >>> def branch(start, tokens, parent):
    ...     return Branch(start=start, tokens=tokens, offset=0, parent=parent, samples=(0,), end=7)
    >>> paths = key_paths([2, 3, 2], [branch(0, 2, -1), branch(2, 3, 0), branch(5, 2, 0)])
    >>> paths.num_queries, paths.num_keys
    ([2, 3, 2], [2, 5, 4])
    >>> paths.order_K
    tensor([0, 1, 0, 1, 2, 3, 4, 0, 1, 5, 6])

    A piece of 2 tokens after one of 3 tokens, and a sample of 2:

    >>> paths = key_paths([2, 2], [branch(0, 2, EARLIER)], carried=[3])
    >>> paths.num_keys, paths.order_K
    ([5, 2], tensor([0, 1, 2, 3, 4, 5, 6]))

    A sample of 5 tokens with windows of 2:

    >>> paths = key_paths([5], (), window=2, max_queries=2)
    >>> paths.num_queries, paths.num_keys, paths.order_K
    ([2, 2, 1], [2, 3, 2], tensor([0, 1, 1, 2, 3, 3, 4]))
    """
    num_carried = sum(carried)
    starts = itertools.accumulate(padded_lengths[:-1], initial=num_carried)
    # The path through each branch.
    through = {-1: [], EARLIER: [torch.arange(num_carried)]}
    num_queries = []
    keys = []
    for index, (start, tokens) in enumerate(zip(starts, padded_lengths, strict=True)):
        parent = branches[index].parent if index < len(branches) else -1
        path = [*through[parent], torch.arange(start, start + tokens)]
        through[index] = path
        whole = torch.cat(path)
        before = len(whole) - tokens
        part = tokens // (2 * cp) if cp > 1 else tokens
        for end in chunk_ends(tokens, cp, cp_rank):
            for count, last in _query_blocks(part, before + end, max_queries or max(part, 1)):
                first = 0 if window is None else max(0, last - count - window + 1)
                num_queries.append(count)
                keys.append(whole[first:last])
    order_K = torch.cat(keys)
    num_keys = [own.numel() for own in keys]
    return Paths(
        num_queries=num_queries,
        num_keys=num_keys,
        order_K=assembly_order([*carried, *padded_lengths], cp)[order_K] if cp > 1 else order_K,
        query_ends=_cumulative(num_queries),
        key_ends=_cumulative(num_keys),
    )


def _query_blocks(num_queries: int, end: int, most: int) -> list[tuple[int, int]]:
    """The number of queries of each block, and where they end, which is also where all end.

    >>> _query_blocks(5, 12, 2)
    [(2, 9), (2, 11), (1, 12)]
    """
    first = end - num_queries
    stops = [*range(first + most, end, most), end]
    starts = [first, *stops[:-1]]
    return [(stop - start, stop) for start, stop in zip(starts, stops, strict=True)]


def _cumulative(counts: Sequence[int]) -> Tensor:
    return torch.tensor([0, *counts]).cumsum(0).to(torch.int32)


def seen_QK(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """bool: the keys that the last queries of a sequence see, with a window at most so many."""
    all_QK = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    last = num_keys - num_queries
    causal_QK = all_QK.tril(last)
    return causal_QK if window is None else causal_QK.triu(last - window + 1)


def chunk_ends(length: int, cp: int, cp_rank: int) -> list[int]:
    """Where each part of a rank's queries ends in a sample, which is also the number of its keys.

    >>> chunk_ends(16, cp=2, cp_rank=0)
    [4, 16]
    """
    if cp == 1:
        return [length]
    chunk = length // (2 * cp)
    return [(cp_rank + 1) * chunk, (2 * cp - cp_rank) * chunk]
