"""Carried keys: attention of a sample's pieces, which are in rows of their own, to those before.

The rows of a chain run forward one after the other, and backward in reverse. In each layer a piece
attends to the keys that earlier rows have kept and its own. The kept ones are leaves of the graph:
later rows add up gradients in them. The backward of a row begins after those of all later ones, so
its keys then get the leaf's gradient besides their own, and the leaf is freed. To rounding that is
the gradient of the whole samples.

With recomputation a layer's forward runs twice. The second time it finds the row's leaf, keeps
nothing, and builds the graph on the same leaves.

With context parallelism a leaf holds the rank's slice of a piece.

Shape suffixes: T tokens of this rank's row, C tokens that earlier rows have kept on this rank, G
groups of key and value heads, D channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megapack.model.attention.row import RowView

_Pair = tuple[Tensor, Tensor]


def with_earlier(row: RowView, layer: Any, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of earlier rows and the row's: [T, G, D] -> [C + T, G, D].

    Keeps those of this row for later ones. Called once by each forward of a layer.

    Args:
        layer: tells the layers apart.
    """
    link = row.link
    if link is None:
        return key, value
    leaves = link.kept(layer)
    earlier = [pair for index, pair in leaves.items() if index < link.index]
    if link.piece.kept_tokens:
        own = _kept(row)
        if link.index not in leaves:
            leaves[link.index] = _leaf(key, own, row), _leaf(value, own, row)
        key, value = _Own.apply(key, value, leaves, link.index, own)  # type: ignore[no-untyped-call]
    elif link.is_last and not link.chain.keeps_gradients:
        leaves.clear()
    if not earlier:
        return key, value
    keys, values = zip(*earlier, strict=True)
    return torch.cat([*keys, key]), torch.cat([*values, value])


def _kept(row: RowView) -> slice:
    """Where the tokens that the row keeps are on this rank."""
    assert row.link is not None
    piece = row.link.piece
    return slice(piece.start // row.cp, (piece.start + piece.kept_tokens) // row.cp)


def _leaf(tensor: Tensor, own: slice, row: RowView) -> Tensor:
    assert row.link is not None
    # A copy: a view would keep the whole row's tensor alive.
    leaf = tensor[own].detach().clone()
    # The first forward of a checkpointed layer does not know whether the second one needs them.
    needs_gradient = tensor.requires_grad or not torch.is_grad_enabled()
    return leaf.requires_grad_(row.link.chain.keeps_gradients and needs_gradient)


class _Own(torch.autograd.Function):
    """A row's keys and values; their gradient has that of the row's leaf."""

    @staticmethod
    def forward(
        ctx: Any, key: Tensor, value: Tensor, leaves: dict[int, _Pair], index: int, own: slice
    ) -> Any:
        ctx.leaves = leaves
        ctx.index = index
        ctx.own = own
        return key.view_as(key), value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(grads, ctx.leaves.pop(ctx.index), strict=True)
        return (*(_with_leaf(grad, leaf, ctx.own) for grad, leaf in pairs), None, None, None)


def _with_leaf(grad: Tensor, leaf: Tensor, own: slice) -> Tensor:
    if leaf.grad is None:
        return grad
    total = grad.clone()
    total[own] += leaf.grad
    return total
