"""Rotary embeddings in one kernel (fused_rope.cu)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megapack.cpu.te.calls import kernel, refuse, require
from megapack.cpu.te.enums import NVTE_QKV_Format
from megapack.cpu.te.precision import wide

_ROW = "qkv_format interleaved cu_seqlens cp_size cp_rank"


@kernel(f"t freqs start_positions {_ROW}")
def fused_rope_forward(*, t: Tensor, freqs: Tensor, **rest: Any) -> Tensor:
    """Rotate the first d2 elements of each head.

    Args:
        t: [s, b, h, d], [b, s, h, d] or, with `cu_seqlens` of the whole row, [t, h, d].
        freqs: angles [s', 1, 1, d2] in fp32.
        rest: see `_rope`.
    """
    return _rope(t, freqs, **rest)


@kernel(f"grad freqs start_positions@2.10 {_ROW}")
def fused_rope_backward(*, grad: Tensor, freqs: Tensor, **rest: Any) -> Tensor:
    """The gradient of `fused_rope_forward`: the opposite rotation."""
    return _rope(grad, -freqs, **rest)


def _rope(
    t: Tensor,
    freqs: Tensor,
    *,
    qkv_format: int,
    interleaved: bool,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
    start_positions: Tensor | None = None,
) -> Tensor:
    require(freqs.dtype == torch.float32, f"fused rope with a table of {freqs.dtype}")
    require(
        freqs.dim() == 4 and freqs.shape[1:3] == (1, 1) and freqs.shape[-1] <= t.shape[-1],
        f"fused rope with a table {tuple(freqs.shape)} for heads {tuple(t.shape)}",
    )
    refuse(start_positions is not None, "fused rope with start positions, as in inference")
    if qkv_format == NVTE_QKV_Format.NVTE_THD:
        assert cu_seqlens is not None
        require(cu_seqlens.dim() == 1, f"fused rope with cu_seqlens {tuple(cu_seqlens.shape)}")
        require(cu_seqlens.dtype == torch.int32, f"fused rope with {cu_seqlens.dtype} cu_seqlens")
        out = torch.zeros_like(t)
        for begin, end in pairwise(length // cp_size for length in cu_seqlens.tolist()):
            angles = _angles(freqs[:, 0], end - begin, cp_size, cp_rank)
            out[begin:end] = _rotated(t[begin:end], angles, interleaved)
        return out
    x = t if qkv_format == NVTE_QKV_Format.NVTE_SBHD else t.transpose(0, 1)
    out = _rotated(x, _angles(freqs, x.shape[0], cp_size, cp_rank), interleaved)
    return out if qkv_format == NVTE_QKV_Format.NVTE_SBHD else out.transpose(0, 1)


def _angles(freqs: Tensor, length: int, cp_size: int, cp_rank: int) -> Tensor:
    """The table's lines for a rank's tokens of a sample, which are two chunks of 2 * cp_size.

    With cp_size 2 and 8 tokens, chunks of 2: rank 0 has positions 0, 1, 6, 7.
    """
    positions = torch.arange(length)
    if cp_size > 1:
        require(length % 2 == 0, f"fused rope of a slice of {length} tokens, which has two chunks")
        half = length // 2
        last = length * cp_size - (cp_rank + 1) * half - half
        positions = positions + torch.where(positions >= half, last, cp_rank * half)
    require(
        not length or int(positions.max()) < len(freqs),
        f"fused rope of {length} tokens reads past a table of {len(freqs)} lines",
    )
    return freqs[positions]


def _rotated(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """x [s, ..., h, d] rotated by angles [s, 1, .., d2]."""
    width = angles.shape[-1]
    part, rest = wide(x[..., :width]), x[..., width:]
    cos, sin = angles.to(part.dtype).cos(), angles.to(part.dtype).sin()
    if interleaved:
        turned = torch.stack((-part[..., 1::2], part[..., ::2]), -1).flatten(-2)
    else:
        first, second = part.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    return torch.cat(((part * cos + turned * sin).to(x.dtype), rest), -1)
