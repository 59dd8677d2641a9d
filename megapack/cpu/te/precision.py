"""The precision that stand-ins compute in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def wide(tensor: Any) -> Tensor:
    """The values as kernels hold them: in fp32, or in fp64 if that is their type."""
    values: Tensor = tensor
    return values if values.dtype == torch.float64 else values.float()


def rows(tensor: Any) -> Tensor:
    """`wide`, with all dimensions but the last as one: [..., h] -> [n, h]."""
    values = wide(tensor)
    return values.reshape(-1, values.shape[-1])
