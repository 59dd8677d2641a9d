"""Context-parallel slices of packed rows, and the way back to the whole row.

    PackedRow -> slice_row (one per rank) -> values at its positions -> assembly_order -> whole row

Late tokens attend to more tokens than early ones. To balance the ranks, each sample is cut into
2 * cp equal parts and rank r holds parts r and 2 * cp - 1 - r, an early and a late one. This is the
zigzag order of Transformer Engine (`thd_get_partitioned_indices`). Samples are padded to whole
parts (`Layout.sample_alignment`), so every rank holds T / cp positions of a row of T.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megapack.errors import DataError
from megapack.rows.packed import PackedRow, RowTokens


def slice_positions(spans: Sequence[int], cp: int, rank: int) -> Tensor:
    """Positions of the whole row that one rank holds.

    Args:
        spans: padded tokens of each sample of the row, dummies included.
        cp: number of context-parallel ranks.
        rank: the rank among them.

    Returns:
        int64 [sum(spans) / cp], ascending.

    Raises:
        DataError: a sample's padded tokens are not a multiple of 2 * cp.

    >>> slice_positions([8, 4], cp=2, rank=0)
    tensor([ 0,  1,  6,  7,  8, 11])
    >>> slice_positions([8, 4], cp=2, rank=1)
    tensor([ 2,  3,  4,  5,  9, 10])
    """
    if cp == 1:
        return torch.arange(sum(spans))
    num_parts = 2 * cp
    indivisible = [span for span in spans if span % num_parts]
    if indivisible:
        raise DataError(
            f"a sample of {indivisible[0]} padded tokens does not divide into {num_parts} parts; "
            f"pack with Layout(cp={cp})"
        )
    tokens_per_part = torch.tensor(spans).repeat_interleave(num_parts) // num_parts
    part_T = torch.arange(num_parts).repeat(len(spans)).repeat_interleave(tokens_per_part)
    return ((part_T == rank) | (part_T == num_parts - 1 - rank)).nonzero().squeeze(1)


def indices_in(positions: Tensor, row_tokens: int) -> Tensor:
    """int64 [row_tokens]: where each position of a row is among `positions`; -1 if it is not.

    >>> indices_in(torch.tensor([3, 1]), 4)
    tensor([-1,  1, -1,  0])
    """
    index_T = torch.full((row_tokens,), -1)
    index_T[positions] = torch.arange(positions.numel())
    return index_T


def assembly_order(spans: Sequence[int], cp: int) -> Tensor:
    """Index of each position of the whole row in the concatenated slices of all ranks.

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
    """One context-parallel rank's slice of a row.

    All per-token tensors (named `*_T` or `*_T3`) are sliced. Of the losses and the ends (`*_E`),
    those at positions of the slice stay, and their positions index the slice.
    Attributes of the whole row stay: samples, branches, `cu_seqlens` (Megatron-Core and Transformer
    Engine divide them by cp) and `row_tokens`.

    Raises:
        DataError: the row was packed for another number of context-parallel ranks.

    >>> from megapack import Layout, MicroBatch
    >>> from megapack.samples import SampleBatch
    >>> from megapack.rows.packing import pack_row
    >>> batch = SampleBatch([[5, 6, 7, 8, 9]])
    >>> micro_batch = MicroBatch((0,), row_tokens=8, tokens=5, tokens_sq=25, padded_tokens=8)
    >>> part = slice_row(pack_row(batch, micro_batch, Layout(cp=2)), cp=2, rank=1)
    >>> part.tokens_T, part.labels_T
    (tensor([7, 8, 9, 0]), tensor([8, 9, 0, 0]))
    >>> part.row_positions_T, part.losses.positions_R
    (tensor([2, 3, 4, 5]), tensor([0, 1]))
    """
    if cp == 1:
        return row
    positions_T = slice_positions(row.padded_lengths, cp, rank)
    index_T = indices_in(positions_T, row.row_tokens)

    def per_token(tokens: RowTokens) -> dict[str, Any]:
        sliced = {
            name: value[positions_T]
            for name, value in vars(tokens).items()
            if name.endswith(("_T", "_T3")) and value is not None
        }
        return {**sliced, "losses": tokens.losses.kept(index_T)}

    ends_E = index_T[row.end_positions_E]
    held_E = ends_E >= 0
    return dataclasses.replace(
        row,
        **per_token(row),
        end_positions_E=ends_E[held_E],
        end_samples_E=row.end_samples_E[held_E],
        ahead=tuple(RowTokens(**per_token(ahead)) for ahead in row.ahead),
    )
