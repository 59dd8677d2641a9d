"""Layer and RMS norms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megapack.cpu.te.calls import kernel, refuse, require
from megapack.cpu.te.enums import torch_dtype
from megapack.cpu.te.precision import rows, wide

Forward = tuple[Any, Tensor | None, Tensor]


@kernel("x weight eps out quantizer otype sm_margin zero_centered_gamma")
def rmsnorm_fwd(
    *, x: Tensor, weight: Tensor, eps: float, zero_centered_gamma: bool, **stored: Any
) -> Forward:
    """The normed rows, no mean, and 1 / rms of each row."""
    _check(x, weight)
    v = rows(x)
    rsigma = torch.rsqrt(v.square().mean(-1) + eps)
    y = v * rsigma[:, None] * _gamma(weight, zero_centered_gamma)
    return _stored(y, x, **stored), None, rsigma


@kernel
def rmsnorm_bwd(
    dz: Tensor, x: Tensor, rsigma: Tensor, weight: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of the rows and of the weight."""
    g, v = rows(dz), rows(x)
    unit = v * rsigma[:, None]
    scaled = g * _gamma(weight, zero_centered_gamma)
    dx = rsigma[:, None] * (scaled - unit * (scaled * unit).mean(-1, keepdim=True))
    return dx.to(x.dtype).view(x.shape), (g * unit).sum(0).to(weight.dtype)


@kernel("x weight bias eps out quantizer otype sm_margin zero_centered_gamma")
def layernorm_fwd(
    *, x: Tensor, weight: Tensor, bias: Tensor, eps: float, zero_centered_gamma: bool, **stored: Any
) -> Forward:
    """The normed rows, and mean and 1 / standard deviation of each row."""
    _check(x, weight)
    v = rows(x)
    mu = v.mean(-1)
    rsigma = torch.rsqrt((v - mu[:, None]).square().mean(-1) + eps)
    y = (v - mu[:, None]) * rsigma[:, None] * _gamma(weight, zero_centered_gamma) + wide(bias)
    return _stored(y, x, **stored), mu, rsigma


@kernel
def layernorm_bwd(
    dz: Tensor,
    x: Tensor,
    mu: Tensor,
    rsigma: Tensor,
    weight: Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the rows, of the weight and of the bias."""
    g, v = rows(dz), rows(x)
    unit = (v - mu[:, None]) * rsigma[:, None]
    scaled = g * _gamma(weight, zero_centered_gamma)
    dx = scaled - scaled.mean(-1, keepdim=True) - unit * (scaled * unit).mean(-1, keepdim=True)
    dx = (rsigma[:, None] * dx).to(x.dtype).view(x.shape)
    return dx, (g * unit).sum(0).to(weight.dtype), g.sum(0).to(weight.dtype)


def _check(x: Tensor, weight: Tensor) -> None:
    require(x.is_contiguous(), f"a norm of a tensor with strides {x.stride()}")
    require(
        x.shape[-1] == weight.numel(),
        f"a norm with {weight.numel()} weights for rows of {x.shape[-1]}",
    )


def _gamma(weight: Tensor, zero_centered: bool) -> Tensor:
    return wide(weight) + 1 if zero_centered else wide(weight)


def _stored(y: Tensor, x: Tensor, *, out: Any, quantizer: Any, otype: Any, **_: Any) -> Any:
    refuse(quantizer is not None, "a norm with a quantized output")
    y = y.to(torch_dtype(otype)).view(x.shape)
    return y if out is None else out.copy_(y)
