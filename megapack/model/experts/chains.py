"""The load balance of a sample in pieces, which counts the choices of all its tokens.

A piece's scores are multiplied by the sample's share of choices, see `rows`. The share is known
once all pieces have run forward, which is before the first backward: so the backward of each
piece's scores reads it. With recomputation the first forward counts, and the second one finds all
counts.

Shape suffixes: t tokens of the row on this rank, S samples of the row, E experts.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megapack.model.experts.rows import branch_shares, whole_sample_counts
from megapack.rows.chain import PIECE
from megapack.rows.packed import RoutingRow


@dataclass
class _Counted:
    """What one layer keeps of a piece."""

    counts_SE: Tensor
    """Of all samples of the piece's row."""
    scores_E: Tensor | None = None
    """Sum of the piece's scores, if its forward with gradients came before the last one's."""


def piece_balance_loss(
    layer: Any, scores_tE: Tensor, chosen_tE: Tensor, row: RoutingRow, top_k: int
) -> Tensor:
    """As `rows.balance_loss`, for a row that has a piece.

    The losses of all rows of the chain add up to those of its whole samples. That of the sample in
    pieces is in the last forward.

    Args:
        layer: tells the layers apart.
    """
    link = row.link
    assert link is not None
    pieces = link.kept(layer)
    if link.index not in pieces:
        pieces[link.index] = _Counted(whole_sample_counts(chosen_tE, row, scores_tE.dtype))
    own = pieces[link.index]
    is_complete = len(pieces) == link.chain.num_pieces
    adds = torch.is_grad_enabled()
    return _LateShares.apply(  # type: ignore[no-any-return, no-untyped-call]
        scores_tE, own, pieces.values(), row, top_k, is_complete, adds
    )


def _shares(own: _Counted, pieces: Collection[_Counted], row: RoutingRow, top_k: int) -> Tensor:
    """The shares of each sample of the row by the counts of its chain so far, [S, E]."""
    counts_SE = own.counts_SE.clone()
    counts_SE[PIECE] = torch.stack([piece.counts_SE[PIECE] for piece in pieces]).sum(0)
    return counts_SE * (counts_SE.shape[1] / top_k) / row.lengths_S[:, None]


class _LateShares(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        scores_tE: Tensor,
        own: _Counted,
        pieces: Collection[_Counted],
        row: RoutingRow,
        top_k: int,
        is_complete: bool,
        adds: bool,
    ) -> Tensor:
        ctx.arguments = own, pieces, row, top_k
        share_SE = _shares(own, pieces, row, top_k)
        shares_tE = branch_shares(share_SE, row)[row.branches_t]
        if is_complete:
            loss = (scores_tE * shares_tE).sum()
            earlier = [piece.scores_E for piece in pieces if piece.scores_E is not None]
            if earlier:
                loss = loss + (sum(earlier[1:], earlier[0]) * share_SE[PIECE]).sum()
            return loss
        is_piece_t1 = row.branches_t[:, None] == PIECE
        if adds:
            own.scores_E = torch.where(is_piece_t1, scores_tE, 0.0).sum(0)
        return torch.where(is_piece_t1, 0.0, scores_tE * shares_tE).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        own, pieces, row, top_k = ctx.arguments
        shares_tE = branch_shares(_shares(own, pieces, row, top_k), row)[row.branches_t]
        return grad * shares_tE, None, None, None, None, None, None
