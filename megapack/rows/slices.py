"""Context-parallel slices of packed rows, and back to the order of the whole row.

    PackedRow -> slice_row (one per rank) -> values at its positions -> assembly_order -> whole row

Late tokens attend to more than early ones. So each sample is cut into 2 * cp equal chunks and rank
r holds chunks r and 2 * cp - 1 - r, an early and a late one: the zigzag order in which Transformer
Engine reads packed rows (its `thd_get_partitioned_indices`). Samples are padded to whole chunks
(`Layout.sample_alignment`), so every rank holds T / cp positions of a row of T.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from megapack.errors import DataError
from megapack.rows.packed import PackedRow


def slice_positions(spans: Sequence[int], cp: int, rank: int) -> Tensor:
    """Positions of a whole row that one rank holds, in the order in which it holds them.

    Args:
        spans: padded tokens of each sample of the row, dummies included.
        cp, rank: context-parallel ranks, and which of them.

    Returns:
        int64 [sum(spans) / cp], ascending.

    Raises:
        DataError: a sample is not a multiple of 2 * cp tokens.

    >>> slice_positions([8, 4], cp=2, rank=0)
    tensor([ 0,  1,  6,  7,  8, 11])
    >>> slice_positions([8, 4], cp=2, rank=1)
    tensor([ 2,  3,  4,  5,  9, 10])
    """
    if cp == 1:
        return torch.arange(sum(spans))
    chunks = 2 * cp
    odd = [span for span in spans if span % chunks]
    if odd:
        raise DataError(
            f"a sample of {odd[0]} padded tokens does not cut into {chunks} chunks; pack with "
            f"Layout(cp={cp})"
        )
    tokens_per_chunk = torch.tensor(spans).repeat_interleave(chunks) // chunks
    chunk_T = torch.arange(chunks).repeat(len(spans)).repeat_interleave(tokens_per_chunk)
    return ((chunk_T == rank) | (chunk_T == chunks - 1 - rank)).nonzero().squeeze(1)


def assembly_order(spans: Sequence[int], cp: int) -> Tensor:
    """Where each position of the whole row stands in all ranks' slices, laid one behind the other.

    The inverse of slicing: `torch.cat(slices)[assembly_order(spans, cp)]` is the whole row.

    >>> row = torch.tensor([10, 11, 12, 13, 14, 15, 16, 17, 20, 21, 22, 23])
    >>> slices = [row[slice_positions([8, 4], cp=2, rank=r)] for r in range(2)]
    >>> slices[1]
    tensor([12, 13, 14, 15, 21, 22])
    >>> torch.cat(slices)[assembly_order([8, 4], cp=2)]
    tensor([10, 11, 12, 13, 14, 15, 16, 17, 20, 21, 22, 23])
    """
    return torch.cat([slice_positions(spans, cp, rank) for rank in range(cp)]).argsort()


def slice_row(row: PackedRow, cp: int, rank: int) -> PackedRow:
    """What one context-parallel rank holds of a row.

    Every per-token tensor (named `*_T`, and the fields) is sliced alike; `loss_positions_R` index
    the slice. What describes the whole row stays as it is: samples, starts, `cu_seqlens` (which
    Megatron-Core and Transformer Engine divide by cp themselves) and `row_tokens`.

    Raises:
        DataError: the row was packed for another number of context-parallel ranks.

    >>> from megapack import Layout, MicroBatch
    >>> from megapack.samples import SampleBatch
    >>> from megapack.rows.packed import pack_row
    >>> batch = SampleBatch([[5, 6, 7, 8, 9]])
    >>> micro_batch = MicroBatch((0,), row_tokens=8, tokens=5, tokens_sq=25, padded_tokens=8)
    >>> part = slice_row(pack_row(batch, micro_batch, Layout(cp=2)), cp=2, rank=1)
    >>> part.tokens_T, part.labels_T
    (tensor([7, 8, 9, 0]), tensor([8, 9, 0, 0]))
    >>> part.row_positions_T, part.loss_positions_R
    (tensor([2, 3, 4, 5]), tensor([0, 1]))
    """
    if cp == 1:
        return row
    positions_T = slice_positions(row.cu_seqlens_padded_S1.diff().tolist(), cp, rank)
    per_token = {n: v[positions_T] for n, v in vars(row).items() if n.endswith("_T")}
    place_T = torch.full((row.row_tokens,), -1)
    place_T[positions_T] = torch.arange(positions_T.numel())
    places_R = place_T[row.loss_positions_R]
    return dataclasses.replace(
        row,
        **per_token,
        loss_positions_R=places_R[places_R >= 0],
        fields={name: values_T[positions_T] for name, values_T in row.fields.items()},
        ahead=tuple(slice_row(other, cp, rank) for other in row.ahead),
    )
