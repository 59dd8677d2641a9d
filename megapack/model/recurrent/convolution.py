"""The short causal convolution before a scan, each channel by itself, with SiLU after it.

Shape suffixes: T tokens of the whole row, C tokens of the longer row (see `segments`), D channels,
W tokens that an output sees.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megapack.model.recurrent.segments import Segments

ConvolutionKernel = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Convolves one sequence: [C, D], [D, W], [D] -> [C, D], or without the first W - 1."""


def convolve_row(
    kernel: ConvolutionKernel,
    x_TD: Tensor,
    weight_DW: Tensor,
    bias_D: Tensor | None,
    segments: Segments,
    earlier: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Convolve a row of segments.

    Args:
        earlier: [W - 1, D], the inputs that an earlier row of the chain has left; None: none has.

    Returns:
        [T, D]; and [W - 1, D], the inputs that the row leaves, or None.
    """
    kernel_size = weight_DW.shape[1]
    way = segments.convolution(kernel_size, x_TD.device)
    before = x_TD.new_zeros(kernel_size - 1, x_TD.shape[1]) if earlier is None else earlier
    table = torch.cat([before, x_TD.new_zeros(1, x_TD.shape[1]), x_TD])
    longer_CD = table.index_select(0, way.lines_C)
    out = kernel(longer_CD, weight_DW, bias_D)
    # A kernel may give outputs for the first tokens, too.
    out = out[len(out) - (len(longer_CD) - kernel_size + 1) :]
    tail = None if way.tail is None else table.index_select(0, way.tail)
    return out.index_select(0, way.kept_T), tail


def torch_convolution(x_CD: Tensor, weight_DW: Tensor, bias_D: Tensor | None) -> Tensor:
    """By torch, on every device and in every precision."""
    out = F.conv1d(x_CD.T[None], weight_DW[:, None], bias_D, groups=x_CD.shape[1])
    return F.silu(out[0].T)


def fla_convolution(x_CD: Tensor, weight_DW: Tensor, bias_D: Tensor | None) -> Tensor:
    """By flash-linear-attention, on a GPU."""
    from fla.modules.convolution import causal_conv1d

    out, _ = causal_conv1d(x=x_CD[None], weight=weight_DW, bias=bias_D, activation="silu")
    return out[0]


def dao_convolution(x_CD: Tensor, weight_DW: Tensor, bias_D: Tensor | None) -> Tensor:
    """By the package causal_conv1d, on a GPU."""
    from causal_conv1d import causal_conv1d_fn

    out = causal_conv1d_fn(x_CD.T[None], weight_DW, bias_D, activation="silu")
    return out[0].T
