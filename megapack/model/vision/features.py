"""Features of images as a decoder reads them, and the gradients that it gives back.

A rank has the features of the images in its rows, of the levels that its layers add. A row names
those that it reads. In the backward each row adds to the gradients of what it has read: an image
that several rows use gets the sum.

Shape suffixes: P image tokens of this rank's part of a row, H channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megapack.model.vision.mrope import Mrope


@dataclass(eq=False)
class FeatureTable:
    """The features that a rank's rows read in one pass."""

    values: Mapping[int, Tensor]
    """By level [features, H]. Level 0 takes the place of embeddings; level k is added after the
    decoder's layer k, counted from 1."""
    collects: bool
    """Whether gradients are collected."""
    gradients: dict[int, Tensor] = field(default_factory=dict)
    """By level fp32 [features, H], once a row has given some."""

    def __post_init__(self) -> None:
        # With it the decoder's inputs have a graph also where the embedding is frozen.
        self.anchor = torch.zeros((), requires_grad=self.collects)

    def add_gradient(self, level: int, index_P: Tensor, grad_PH: Tensor) -> None:
        """Add the gradients of these features; a feature may be there several times."""
        if level not in self.gradients:
            shape = self.values[level].shape
            self.gradients[level] = grad_PH.new_zeros(shape, dtype=torch.float32)
        self.gradients[level].index_add_(0, index_P, grad_PH.float())


@dataclass(frozen=True, eq=False)
class RowFeatures:
    """What a row reads, on this rank."""

    table: FeatureTable
    positions_P: Tensor
    """int64: index of each image token among the hidden states of this rank."""
    index_P: Tensor
    """int64: its feature in the table."""

    def put(self, level: int, hidden: Tensor) -> Tensor:
        """Hidden states [tokens, 1, H] with the features of a level: in place of image tokens at
        level 0, added to them at others."""
        if level not in self.table.values:
            return hidden
        return _Put.apply(hidden, self.table.anchor, level, self)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True, eq=False)
class RowImages:
    """What layers need of a row with images."""

    rotary_T3: Tensor
    """int64: the three positions of each token of this rank's slice."""
    mrope: Mrope
    features: RowFeatures


class _Put(torch.autograd.Function):
    """Features into hidden states; the backward gives their gradients to the table.

    The table's gradients are no outputs of autograd: each row would make a tensor as large as the
    table. The function may run twice, where layers are recomputed; its backward runs once.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, anchor: Tensor, level: int, features: RowFeatures
    ) -> Tensor:
        ctx.level, ctx.features = level, features
        values_PH = features.table.values[level][features.index_P].to(hidden.dtype)[:, None]
        if level:
            return hidden.index_add(0, features.positions_P, values_PH)
        return hidden.index_copy(0, features.positions_P, values_PH)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        features: RowFeatures = ctx.features
        if features.table.collects:
            grad_PH = grad[features.positions_P, 0]
            features.table.add_gradient(ctx.level, features.index_P, grad_PH)
        if not ctx.level:
            # Nothing flows to the embedding of what was replaced.
            grad = grad.index_fill(0, features.positions_P, 0)
        return grad, None, None, None
