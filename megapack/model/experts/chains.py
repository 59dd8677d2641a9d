"""The load balance of a sample in pieces, which counts the choices of all its tokens.

A piece's scores are multiplied by the sample's share of choices, see `rows`. The share is known
once all pieces have run forward, which is before the first backward: so the backward of each
piece's scores reads it. With recomputation the first forward counts, and the second one finds all
counts.

Shape suffixes: t tokens of the row on this rank, S samples of the row, E experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megapack.model.experts.rows import branch_shares, whole_sample_counts
from megapack.rows.packed import PackedRow, RoutingRow


class _Layer:
    """One layer's counts of the pieces of a sample."""

    def __init__(self) -> None:
        # Piece -> [S, E], of all samples of its row.
        self.counts: dict[int, Tensor] = {}
        # Sum of the scores of pieces whose forward came before the last one's, [E].
        self.pending: Tensor | None = None


class _Chain:
    """The counts of the pieces of one sample, in the layers of this rank.

    Args:
        count: number of pieces.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.layers: dict[Any, _Layer] = {}


class ChainCounts:
    """One piece of a chain.

    Args:
        index: of the piece in its chain.
    """

    def __init__(self, chain: _Chain, index: int) -> None:
        self._chain = chain
        self._index = index

    def balance_loss(
        self, layer: Any, scores_tE: Tensor, chosen_tE: Tensor, row: RoutingRow, top_k: int
    ) -> Tensor:
        """As `rows.balance_loss`, for a row that has a piece.

        The losses of all rows of the chain add up to those of its whole samples. That of the
        sample in pieces is in the last forward.

        Args:
            layer: tells the layers apart.
        """
        own = self._chain.layers.setdefault(layer, _Layer())
        if self._index not in own.counts:
            own.counts[self._index] = whole_sample_counts(chosen_tE, row, scores_tE.dtype)
        adds = torch.is_grad_enabled()
        return _LateShares.apply(scores_tE, self, own, row, top_k, adds)  # type: ignore[no-any-return, no-untyped-call]

    def shares(self, own: _Layer, row: RoutingRow, top_k: int) -> Tensor:
        """The shares of each sample of the row by the counts so far, [S, E]."""
        counts_SE = own.counts[self._index].clone()
        # In the order of the pieces, also when they are recomputed.
        counts_SE[0] = torch.stack([own.counts[k][0] for k in sorted(own.counts)]).sum(0)
        return counts_SE * (counts_SE.shape[1] / top_k) / row.lengths_S[:, None]

    def is_complete(self, own: _Layer) -> bool:
        """Whether all pieces have been counted."""
        return len(own.counts) == self._chain.count


class _LateShares(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        scores_tE: Tensor,
        piece: ChainCounts,
        own: _Layer,
        row: RoutingRow,
        top_k: int,
        adds: bool,
    ) -> Tensor:
        ctx.arguments = piece, own, row, top_k
        share_SE = piece.shares(own, row, top_k)
        shares_tE = branch_shares(share_SE, row)[row.branches_t]
        if piece.is_complete(own):
            loss = (scores_tE * shares_tE).sum()
            if own.pending is not None:
                loss = loss + (own.pending * share_SE[0]).sum()
                own.pending = None
            return loss
        # The piece is the row's first branch.
        is_piece_t1 = row.branches_t[:, None] == 0
        if adds:
            scores_E = torch.where(is_piece_t1, scores_tE, 0.0).sum(0)
            own.pending = scores_E if own.pending is None else own.pending + scores_E
        return torch.where(is_piece_t1, 0.0, scores_tE * shares_tE).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        piece, own, row, top_k = ctx.arguments
        shares_tE = branch_shares(piece.shares(own, row, top_k), row)[row.branches_t]
        return grad * shares_tE, None, None, None, None, None


def with_chain_counts(rows: Sequence[PackedRow]) -> list[PackedRow]:
    """The rows, of which those of a chain know the counts of each other.

    Args:
        rows: of this rank, in the order of the plan.
    """
    out: list[PackedRow] = []
    chain: list[PackedRow] = []
    for row in rows:
        out.append(row)
        if row.piece is None or row.routing is None:
            continue
        chain.append(row)
        if row.ends_chain:
            counts = _Chain(len(chain))
            first = len(out) - len(chain)
            for index, own in enumerate(chain):
                routing = dataclasses.replace(own.routing, chain=ChainCounts(counts, index))
                out[first + index] = dataclasses.replace(own, routing=routing)
            chain = []
    return out
