"""What rows of a chain, with pieces of the same samples, carry to later ones in each layer.

Attention carries keys and values: a piece attends to those of all earlier rows and its own. A
recurrent layer carries what the last row before has left: a state and a few inputs of the
convolution, the same bytes after 100 tokens as after 100,000.

The rows run forward one after the other, and backward in reverse. What a row leaves are leaves of
the graph: later rows add up gradients in them. The backward of a row begins after those of all
later ones. It gives what the row has left the leaf's gradient, and the leaf is freed. To rounding
that is the gradient of the whole samples.

With recomputation a layer's forward runs twice. The second time it finds the row's leaves, leaves
nothing, and builds the graph on the same ones.

With context parallelism keys are those of the rank's slice of a piece, and states those of the
rank's heads.

Shape suffixes: T tokens of this rank's row, C tokens that earlier rows have left on this rank, G
groups of key and value heads, D channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megapack.model.attention.row import RowView
from megapack.rows.chain import Link

Left = tuple[Tensor, ...]


def earlier(link: Link | None, layer: Any) -> list[Left]:
    """What each row of the chain before this one has left to a layer."""
    if link is None:
        return []
    return [left for index, left in link.kept(layer).items() if index < link.index]


def leave(link: Link | None, layer: Any, out: Tensor, values: tuple[Tensor | None, ...]) -> Tensor:
    """Leave copies of values to later rows of the chain. Call once in each forward of a layer.

    Args:
        out: what has a gradient in every backward of the row.
        values: None each, or none at all, if the row leaves nothing.

    Returns:
        `out`, whose backward sends the gradients of what was left into `values`.
    """
    if link is None:
        return out
    kept = link.kept(layer)
    left = tuple(value for value in values if value is not None)
    if not left:
        if link.is_last and not link.chain.keeps_gradients:
            kept.clear()
        return out
    if link.index not in kept:
        kept[link.index] = tuple(_leaf(value, link) for value in left)
    left_out: Tensor = _Leave.apply(out, kept, link.index, *left)  # type: ignore[no-untyped-call]
    return left_out


def with_earlier_keys(
    row: RowView, layer: Any, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys and values of earlier rows and the row's: [T, G, D] -> [C + T, G, D].

    Leaves those of this row to later ones. Called once by each forward of a layer.
    """
    link = row.link
    if link is None:
        return key, value
    before = earlier(link, layer)
    piece = link.piece
    own = slice(piece.start // row.cp, (piece.start + piece.kept_tokens) // row.cp)
    key = leave(link, layer, key, (key[own], value[own]) if piece.kept_tokens else ())
    if not before:
        return key, value
    keys, values = zip(*before, strict=True)
    return torch.cat([*keys, key]), torch.cat([*values, value])


def _leaf(value: Tensor, link: Link) -> Tensor:
    # The first forward of a checkpointed layer does not know whether the second one needs them.
    needs_gradient = value.requires_grad or not torch.is_grad_enabled()
    # A copy: a view would keep the whole row's tensor alive.
    leaf = value.detach().clone()
    return leaf.requires_grad_(link.chain.keeps_gradients and needs_gradient)


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, kept: dict[int, Left], index: int, *left: Tensor) -> Tensor:
        ctx.kept = kept
        ctx.index = index
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        leaves = ctx.kept.pop(ctx.index)
        return grad, None, None, *(leaf.grad for leaf in leaves)
