"""Activations, with and without a gate, and their gradients.

An activation with a gate reads x = [a, b] and gives f(a) * b.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megapack.cpu.te.calls import kernel, refuse
from megapack.cpu.te.precision import wide

Function = Callable[[Tensor], Tensor]


def _gated(function: Function) -> Function:
    def gated(x: Tensor) -> Tensor:
        gate, linear = x.chunk(2, -1)
        return function(gate) * linear

    return gated


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _qgelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _srelu(x: Tensor) -> Tensor:
    return F.relu(x).square()


FUNCTIONS: dict[str, Function] = {
    **{"gelu": _gelu, "qgelu": _qgelu, "relu": F.relu, "srelu": _srelu, "silu": F.silu},
    **{"geglu": _gated(_gelu), "qgeglu": _gated(_qgelu), "reglu": _gated(F.relu)},
    **{"sreglu": _gated(_srelu), "swiglu": _gated(F.silu)},
}


def _forward(name: str, function: Function) -> Any:
    def forward(x: Tensor, quantizer: Any) -> Tensor:
        refuse(quantizer is not None, f"{name} with a quantized output")
        return function(wide(x)).to(x.dtype)

    forward.__name__ = name
    return forward


def _backward(name: str, function: Function) -> Any:
    def backward(grad: Tensor, x: Tensor, quantizer: Any) -> Tensor:
        refuse(quantizer is not None, f"d{name} with a quantized output")
        with torch.enable_grad():
            v = wide(x).detach().requires_grad_()
            (dx,) = torch.autograd.grad(function(v), v, wide(grad))
        return dx.to(x.dtype)

    backward.__name__ = f"d{name}"
    return backward


for _name, _function in FUNCTIONS.items():
    kernel(_forward(_name, _function))
    kernel(_backward(_name, _function))
