"""Packed attention as our kernel on every device runs it, and each sample by itself."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megapack.model.attention.paths import key_paths
from megapack.model.attention.sdpa import path_causal_attention
from megapack.rows.slices import slice_positions


def sample_attention(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float) -> Tensor:
    """Causal attention of one sample after the other, [T, heads, d]."""
    out = []
    for parts in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        heads = (x.transpose(0, 1) for x in parts)
        alone = F.scaled_dot_product_attention(*heads, is_causal=True, scale=scale, enable_gqa=True)
        out.append(alone.transpose(0, 1))
    return torch.cat(out)


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float, *, cp: int = 1, rank: int = 0
) -> Tensor:
    """Attention of the queries of a rank's slice, by `path_causal_attention`.

    Args:
        k, v: of the whole row.
    """
    paths = key_paths(lengths, (), cp=cp, cp_rank=rank)
    slices = torch.cat([slice_positions(lengths, cp, each) for each in range(cp)])
    keys, values = (x[slices][paths.order_K] for x in (k, v))
    return path_causal_attention(q, keys, values, paths, scale)
