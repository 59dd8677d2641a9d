"""Scaled and masked softmax of unfused attention, in one kernel (fused_softmax)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megapack.cpu.te.calls import kernel
from megapack.cpu.te.precision import wide


@kernel
def scaled_softmax_forward(x: Tensor, scale: Any) -> Tensor:
    """softmax(scale * x) over keys; x [b, h, q, k]."""
    return _softmax(x, scale, None)


@kernel
def scaled_masked_softmax_forward(x: Tensor, mask: Tensor, scale: Any) -> Tensor:
    """`scaled_softmax_forward` with keys hidden where the mask [b or 1, 1, q, k] is True."""
    return _softmax(x, scale, mask.bool())


@kernel
def scaled_upper_triang_masked_softmax_forward(x: Tensor, scale: Any) -> Tensor:
    """`scaled_softmax_forward` of x [b * h, q, q] with later keys hidden."""
    return _softmax(x, scale, _later(x, 0))


@kernel
def scaled_aligned_causal_masked_softmax_forward(x: Tensor, scale: Any) -> Tensor:
    """`scaled_softmax_forward` of x [b, h, q, k], the last query at the last key."""
    return _softmax(x, scale, _later(x, x.shape[-1] - x.shape[-2]))


def _backward(grad: Tensor, probabilities: Tensor, scale: Any) -> Tensor:
    """The gradient of scores, of which hidden ones have probability 0."""
    g, p = wide(grad), wide(probabilities)
    return (scale * p * (g - (g * p).sum(-1, keepdim=True))).to(grad.dtype)


def _softmax(x: Tensor, scale: Any, hidden: Tensor | None) -> Tensor:
    scores = wide(x) * scale
    if hidden is not None:
        scores = scores.masked_fill(hidden, -10000.0 if hidden.all(-1).any() else float("-inf"))
    return scores.softmax(-1).to(x.dtype)


def _later(x: Tensor, shift: int) -> Tensor:
    return torch.ones(x.shape[-2:], dtype=torch.bool).triu(1 + shift)


for _name in (
    "scaled",
    "scaled_masked",
    "scaled_upper_triang_masked",
    "scaled_aligned_causal_masked",
):

    def _named(grad: Tensor, probabilities: Tensor, scale: Any) -> Tensor:
        return _backward(grad, probabilities, scale)

    _named.__name__ = f"{_name}_softmax_backward"
    kernel(_named)
