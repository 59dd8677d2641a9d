"""The load balance of samples in pieces, which counts the choices of all their tokens.

A token's scores are multiplied by its samples' shares of choices, see `rows`. The shares are known
once all rows of a chain have run forward, which is before the first backward: so the backward of
each row's scores reads them. With recomputation the first forward counts, and the second one finds
all counts.

Shape suffixes: t tokens of the row on this rank, S samples of the row, C samples of the chain, J
branches of the row, E experts.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megapack.model.experts.rows import branch_shares, sample_counts
from megapack.rows.packed import RoutingRow


@dataclass
class _Counted:
    """What one layer keeps of a row."""

    row: RoutingRow
    """Without its link, whose chain keeps this object: a circle would not be freed."""
    samples_S: Tensor
    """int64: index of each sample among those of the chain."""
    counts_SE: Tensor
    scores_JE: Tensor | None = None
    """Sum of each branch's scores, if the row's forward with gradients came before the last one's;
    padding is a branch."""


def piece_balance_loss(
    layer: Any, scores_tE: Tensor, chosen_tE: Tensor, row: RoutingRow, top_k: int
) -> Tensor:
    """As `rows.balance_loss`, for a row that has pieces.

    The losses of all rows of the chain add up to those of its samples. All are in the last forward,
    unless rows are recomputed.

    Args:
        layer: tells the layers apart.
    """
    link = row.link
    assert link is not None
    rows = link.kept(layer)
    if link.index not in rows:
        counts_SE = sample_counts(chosen_tE, row, scores_tE.dtype)
        rows[link.index] = _Counted(replace(row, link=None), link.samples_n, counts_SE)
    own = rows[link.index]
    is_complete = len(rows) == link.chain.num_rows
    adds = torch.is_grad_enabled()
    return _LateShares.apply(  # type: ignore[no-any-return, no-untyped-call]
        scores_tE, own, rows.values(), link.chain.num_samples, top_k, is_complete, adds
    )


def _shares(own: _Counted, rows: Collection[_Counted], num_samples: int, top_k: int) -> Tensor:
    """The shares of each branch of a row by the counts of its chain so far, [J + 1, E]."""
    num_experts = own.counts_SE.shape[1]
    counts_CE = own.counts_SE.new_zeros(num_samples, num_experts)
    for row in rows:
        counts_CE.index_add_(0, row.samples_S, row.counts_SE)
    counts_SE = counts_CE[own.samples_S]
    return branch_shares(counts_SE * (num_experts / top_k) / own.row.lengths_S[:, None], own.row)


def _branch_sums(scores_tE: Tensor, row: RoutingRow) -> Tensor:
    """The sum of each branch's scores, [J + 1, E]; not by index_add, see `rows.branch_shares`."""
    branches_J = torch.arange(row.num_branches + 1, device=scores_tE.device)
    member_Jt = (branches_J[:, None] == row.branches_t).double()
    return (member_Jt @ scores_tE.double()).to(scores_tE.dtype)


class _LateShares(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        scores_tE: Tensor,
        own: _Counted,
        rows: Collection[_Counted],
        num_samples: int,
        top_k: int,
        is_complete: bool,
        adds: bool,
    ) -> Tensor:
        ctx.arguments = own, rows, num_samples, top_k
        if is_complete:
            loss = (scores_tE * _shares(*ctx.arguments)[own.row.branches_t]).sum()
            for row in rows:
                if row.scores_JE is not None:
                    loss = loss + (row.scores_JE * _shares(row, rows, num_samples, top_k)).sum()
            return loss
        if adds:
            own.scores_JE = _branch_sums(scores_tE, own.row)
        return scores_tE.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        own, *_ = ctx.arguments
        shares_tE = _shares(*ctx.arguments)[own.row.branches_t]
        return grad * shares_tE, None, None, None, None, None, None
