"""Carried keys: attention of a sample's pieces, which are rows of their own, to the pieces before.

The rows of a chain run forward one after the other, and backward in reverse. In each layer a piece
attends to the keys of the earlier pieces and its own. The earlier ones are leaves of the graph:
later pieces add up gradients in them. The backward of a piece begins after those of all later ones,
so its keys then get the leaf's gradient besides their own, and the leaf is freed. To rounding that
is the gradient of the whole sample.

With recomputation a layer's forward runs twice. The second time it finds the piece's leaf, keeps
nothing, and builds the graph on the same leaves.

With context parallelism a leaf holds the rank's slice of a piece.

Shape suffixes: T tokens of this rank's row, C tokens of the earlier pieces on this rank, G groups
of key and value heads, D channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megapack.model.attention.row import RowView

_Pair = tuple[Tensor, Tensor]


def with_earlier(row: RowView, layer: Any, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The earlier pieces' keys and values and the row's: [T, G, D] -> [C + T, G, D].

    Keeps those of this piece for later ones. Called once by each forward of a layer.

    Args:
        layer: tells the layers apart.
    """
    link = row.link
    if link is None:
        return key, value
    leaves = link.kept(layer)
    earlier = [leaves[index] for index in range(link.index)]
    if not link.is_last:
        if link.index not in leaves:
            leaves[link.index] = _leaf(key, row), _leaf(value, row)
        key, value = _Own.apply(key, value, leaves, link.index)  # type: ignore[no-untyped-call]
    elif not link.chain.keeps_gradients:
        leaves.clear()
    if not earlier:
        return key, value
    keys, values = zip(*earlier, strict=True)
    return torch.cat([*keys, key]), torch.cat([*values, value])


def _leaf(tensor: Tensor, row: RowView) -> Tensor:
    assert row.link is not None
    tokens = row.link.padded_tokens // row.cp
    # A copy: a view would keep the whole row's tensor alive.
    own = tensor[:tokens].detach().clone()
    # The first forward of a checkpointed layer does not know whether the second one needs them.
    needs_gradient = tensor.requires_grad or not torch.is_grad_enabled()
    return own.requires_grad_(row.link.chain.keeps_gradients and needs_gradient)


class _Own(torch.autograd.Function):
    """A piece's keys and values; their gradient has that of the piece's leaf."""

    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, leaves: dict[int, _Pair], index: int) -> Any:
        ctx.leaves = leaves
        ctx.index = index
        return key.view_as(key), value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        leaves = ctx.leaves.pop(ctx.index)
        return (*map(_with_leaf, grads, leaves), None, None)


def _with_leaf(grad: Tensor, leaf: Tensor) -> Tensor:
    if leaf.grad is None:
        return grad
    total = grad.clone()
    total[: leaf.shape[0]] += leaf.grad
    return total
