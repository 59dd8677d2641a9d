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

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megapack.model.attention.packed import CarriedKeys, set_carried
from megapack.rows.packed import PackedRow

_Pair = tuple[Tensor, Tensor]


class _Chain:
    """The keys and values that the pieces of one sample leave on this rank.

    Args:
        count: number of pieces.
        keeps_gradients: whether backwards follow.
    """

    def __init__(self, count: int, *, keeps_gradients: bool) -> None:
        self.count = count
        self.keeps_gradients = keeps_gradients
        # Layer -> piece -> leaves of keys and values.
        self.leaves: dict[Any, dict[int, _Pair]] = {}


class _Carried(CarriedKeys):
    """One piece of a chain.

    Args:
        index: of the piece in its chain.
        tokens: of this piece in this rank's row, with alignment padding.
        lengths: padded tokens of the earlier pieces, over all ranks.
    """

    def __init__(self, chain: _Chain, index: int, tokens: int, lengths: Sequence[int]) -> None:
        self._chain = chain
        self._index = index
        self._tokens = tokens
        self.lengths = tuple(lengths)

    def join(self, layer: Any, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        chain = self._chain
        leaves = chain.leaves.setdefault(layer, {})
        earlier = [leaves[index] for index in range(self._index)]
        if self._index + 1 < chain.count:
            if self._index not in leaves:
                leaves[self._index] = self._leaf(key), self._leaf(value)
            key, value = _Own.apply(key, value, leaves, self._index)  # type: ignore[no-untyped-call]
        elif not chain.keeps_gradients:
            del chain.leaves[layer]
        if not earlier:
            return key, value
        keys, values = zip(*earlier, strict=True)
        return torch.cat([*keys, key]), torch.cat([*values, value])

    def _leaf(self, tensor: Tensor) -> Tensor:
        # A copy: a view would keep the whole row's tensor alive.
        own = tensor[: self._tokens].detach().clone()
        # The first forward of a checkpointed layer does not know whether the second one needs them.
        needs_gradient = tensor.requires_grad or not torch.is_grad_enabled()
        return own.requires_grad_(self._chain.keeps_gradients and needs_gradient)


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


def carry_keys(rows: Sequence[PackedRow], *, keeps_gradients: bool) -> None:
    """Let the rows of each chain attend to its earlier pieces, by an entry in their `params`.

    Args:
        rows: of this rank, with their `params`, in the order of the plan.
        keeps_gradients: whether backwards follow; else a layer's keys are dropped once it has run
            the chain's last piece.
    """
    chain: list[PackedRow] = []
    for row in rows:
        if row.piece is None:
            continue
        chain.append(row)
        if row.ends_chain:
            _carry_chain(chain, keeps_gradients)
            chain = []


def _carry_chain(rows: Sequence[PackedRow], keeps_gradients: bool) -> None:
    chain = _Chain(len(rows), keeps_gradients=keeps_gradients)
    lengths: list[int] = []
    for index, row in enumerate(rows):
        tokens = row.padded_lengths[0]
        set_carried(row.params, _Carried(chain, index, tokens // row.num_slices, lengths))
        lengths.append(tokens)
