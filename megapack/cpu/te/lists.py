"""Kernels over lists of tensors: Adam, scaling, norms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megapack.cpu.te.calls import kernel, require
from megapack.cpu.te.precision import wide

Lists = Sequence[Sequence[Tensor]]


@kernel
def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, lists: Lists, scale: float) -> None:
    """targets = sources * scale; `noop_flag` is set where a source is not finite."""
    for source, target in zip(*lists, strict=True):
        if not bool(source.isfinite().all()):
            noop_flag.fill_(1)
        target.copy_(wide(source) * scale)


@kernel
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, lists: Lists, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """The norm of all elements [1], and of each tensor [n] if asked for."""
    norms = torch.stack([wide(tensor).norm() for tensor in lists[0]])
    return norms.norm().view(1), norms if per_tensor else norms.new_empty(0)


@kernel
def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    **scales: Any,
) -> None:
    """A step of Adam (`mode` 0) or AdamW (1) on gradients, weights, both moments, and masters."""
    require(not any(scale is not None for scale in scales.values()), f"Adam with {list(scales)}")
    for grad, param, moment, square, *master in zip(*lists, strict=True):
        weights = master[0] if master else param
        g, p = wide(grad), wide(weights)
        m, v = wide(moment), wide(square)
        if mode == 0:
            g = g + weight_decay * p
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        corrected = _corrected(m, beta1, step, bias_correction)
        update = corrected / (_corrected(v, beta2, step, bias_correction).sqrt() + eps)
        if mode == 1:
            update = update + weight_decay * p
        p = p - lr * update
        for target, value in ((moment, m), (square, v), (weights, p), (param, p)):
            target.copy_(value)


def _corrected(moment: Tensor, beta: float, step: int, bias_correction: int) -> Tensor:
    return moment / (1 - beta**step) if bias_correction else moment
