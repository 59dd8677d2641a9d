"""Attention and rotation by hand, in double precision, for stand-ins to be compared with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    bottom_right: bool = False,
    window: tuple[int, int] = (-1, -1),
) -> Tensor:
    """One sample: q [n, heads, d], k and v [m, groups, d] -> [n, heads, d], query by query."""
    share = q.shape[1] // k.shape[1]
    outputs = []
    for i in range(len(q)):
        at = i + (len(k) - len(q) if bottom_right else 0)
        last = at if causal else len(k) - 1
        if window[1] >= 0:
            last = min(last, at + window[1])
        first = at - window[0] if window[0] >= 0 else 0
        seen = range(max(first, 0), min(last, len(k) - 1) + 1)
        heads = []
        for head in range(q.shape[1]):
            keys = k[list(seen), head // share]
            weights = (keys @ q[i, head] * q.shape[-1] ** -0.5).softmax(0)
            heads.append(weights @ v[list(seen), head // share])
        outputs.append(torch.stack(heads))
    return torch.stack(outputs)


def ends(lengths: Sequence[int]) -> Tensor:
    """`cu_seqlens` of samples."""
    return torch.tensor([0, *lengths]).cumsum(0).int()
