"""Which keys the queries of torch's flash attention see in packed rows."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def band(num_queries: int, num_keys: int, before: int) -> Tensor:
    """The keys that the last queries of a sequence see; `before` below 0 = all earlier ones."""
    distance = torch.arange(num_queries)[:, None] + num_keys - num_queries - torch.arange(num_keys)
    return (distance >= 0) & ((distance <= before) | (before < 0))


def sequences(query_ends: Tensor, key_ends: Tensor) -> list[tuple[slice, slice]]:
    """Queries and keys of each sequence."""
    pairs = zip(query_ends.tolist(), key_ends.tolist(), strict=True)
    return [
        (slice(q, q_end), slice(k, k_end)) for (q, k), (q_end, k_end) in itertools.pairwise(pairs)
    ]
