"""Attention over packed rows whose scores are capped (Gemma 2).

A score s becomes c * tanh(s / c) before the softmax, of which no fused kernel here has an option.

Shape suffixes: Q queries and K keys, H heads, G groups of them, R heads of a group, D channels of
queries and keys, V of values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megapack.model.attention.chunked import Chunk, by_chunks
from megapack.model.attention.paths import Paths


def capped_attention(
    query_QHD: Tensor,
    key_KGD: Tensor,
    value_KGV: Tensor,
    paths: Paths,
    *,
    cap: float,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Causal attention of each sequence of `paths`, whose last query sees its last key.

    Args:
        query_QHD: queries of all sequences, one after the other.
        key_KGD, value_KGV: gathered keys and values of all sequences.
        cap: limit of a score's absolute value.
        scale: factor of the scores before they are capped.
        window: keys that a query sees, its own and those before it; None = all.

    Returns:
        [Q, H, V].
    """
    groups = key_KGD.shape[1]

    def attend(chunk: Chunk, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, None]:
        query_GRQD = torch.unflatten(query, 1, (groups, -1)).permute(1, 2, 0, 3)
        key_GKD, value_GKV = (x.transpose(0, 1)[:, None] for x in (key, value))
        scores_GRQK = query_GRQD @ key_GKD.transpose(-1, -2) * (scale / cap)
        scores_GRQK = (scores_GRQK.tanh() * cap).masked_fill(
            chunk.hidden_QK(query.device, window), -torch.inf
        )
        out_GRQV = scores_GRQK.softmax(-1) @ value_GKV
        return out_GRQV.permute(2, 0, 1, 3).flatten(1, 2), None

    heads = query_QHD.shape[1]
    return by_chunks(attend, paths, heads, [query_QHD], [key_KGD, value_KGV])[0]
