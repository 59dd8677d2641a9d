"""Carried states: what a sample's pieces, in rows of their own, leave to the next ones.

As with carried keys (see `attention.carried`), what a row leaves are leaves of the graph: later
rows add up gradients in them, and the row's backward, which comes after those of all later ones,
takes them. A scan needs only what the last row before has left: a state and a few inputs of the
convolution per layer, the same bytes after 100 tokens as after 100,000.

With recomputation a layer's forward runs twice. The second time it finds the row's leaves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megapack.rows.chain import Link

Left = tuple[Tensor, ...]


def earlier(link: Link | None, layer: Any) -> Left | None:
    """What the rows of the chain before this one have left to a layer; None: nothing."""
    if link is None:
        return None
    before = [left for index, left in link.kept(layer).items() if index < link.index]
    return before[-1] if before else None


def leave(link: Link | None, layer: Any, out: Tensor, values: tuple[Tensor | None, ...]) -> Tensor:
    """Leave values to later rows of the chain. Call once in each forward of a layer.

    Args:
        out: what the layer gives for the row.
        values: None each if the row leaves nothing.

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
    return _Leave.apply(out, kept, link.index, *left)


def _leaf(value: Tensor, link: Link) -> Tensor:
    # The first forward of a checkpointed layer does not know whether the second one needs them.
    needs_gradient = value.requires_grad or not torch.is_grad_enabled()
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
