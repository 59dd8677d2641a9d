"""Matrix products: cuBLAS's, of one pair and of many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megapack.cpu.te.calls import kernel, refuse, require
from megapack.cpu.te.enums import torch_dtype
from megapack.cpu.te.precision import rows


@kernel(
    "A transa B transb out quantizer out_dtype bias bias_dtype gelu gelu_in grad workspace "
    "workspace_size accumulate use_split_accumulator"
)
def generic_gemm(
    *,
    A: Any,
    transa: bool,
    B: Any,
    transb: bool,
    out: Any,
    quantizer: Any,
    out_dtype: Any,
    bias: Tensor | None,
    bias_dtype: Any,
    gelu: bool,
    grad: bool,
    accumulate: bool,
    comm_overlap: Any = None,
    extra_output: Any = None,
    alpha: float = 1.0,
    **_: Any,
) -> tuple[Any, Tensor | None, Any, Any]:
    """opB(B) @ opA(A), added to `out` or to a new tensor; with `grad` also the bias's gradient.

    cuBLAS's matrices are column by column, so its A is the right factor: with x [n, k] and a weight
    [m, k], "TN" gives x @ weight.T.
    """
    refuse(quantizer is not None, "generic_gemm with a quantized output")
    refuse(comm_overlap is not None, "generic_gemm with user buffers (tp_comm_overlap)")
    refuse(gelu, "generic_gemm with a fused GELU")
    dtype = A.dtype if out_dtype is None else torch_dtype(out_dtype)
    product = _product(A, transa, B, transb) * alpha
    bias_grad = None
    if bias is not None and bias.numel():
        if grad:
            bias_grad = rows(B).sum(0).to(torch_dtype(bias_dtype))
        else:
            product = product + bias.to(product.dtype)
    if out is None:
        return product.to(dtype), bias_grad, None, extra_output
    require(out.dtype == dtype, f"generic_gemm: out is {out.dtype}, asked for {dtype}")
    _store(product, out, accumulate)
    return out, bias_grad, None, extra_output


@kernel(
    "A transa B transb D D_type m_splits bias bias_type single_output pre_gelu_out grad workspace "
    "workspace_size accumulate use_split_accumulator math_sm_count"
)
def te_general_grouped_gemm(
    *,
    A: Sequence[Any],
    transa: bool,
    B: Sequence[Any],
    transb: bool,
    D: Sequence[Tensor],
    D_type: Any,
    m_splits: Sequence[int],
    bias: Sequence[Tensor],
    single_output: bool,
    grad: bool,
    accumulate: bool,
    **_: Any,
) -> Sequence[Tensor]:
    """`generic_gemm` of each pair; `single_output`: the results are rows of one tensor."""
    if single_output:
        require(len(D) == 1, f"te_general_grouped_gemm: {len(D)} tensors for a single output")
        require(
            sum(m_splits) == len(D[0]),
            f"te_general_grouped_gemm: splits of {sum(m_splits)} rows, an output of {len(D[0])}",
        )
    outs = torch.split(D[0], list(m_splits)) if single_output else D
    dtype = torch_dtype(D_type)
    for a, b, out, own_bias in zip(A, B, outs, bias, strict=True):
        require(out.dtype == dtype, f"te_general_grouped_gemm: out is {out.dtype}, not {dtype}")
        product = _product(a, transa, b, transb)
        if own_bias.numel():
            if grad:
                own_bias.copy_(rows(b).sum(0))
            else:
                product = product + own_bias.to(product.dtype)
        _store(product, out, accumulate)
    return bias


def _product(A: Tensor, transa: bool, B: Tensor, transb: bool) -> Tensor:
    """opB(B) @ opA(A), wider than they are, with B's other dimensions where B is not transposed."""
    a, b = rows(A), rows(B)
    left, right = b.t() if transb else b, a.t() if transa else a
    require(
        left.shape[1] == right.shape[0],
        f"a product of matrices {tuple(left.shape)} and {tuple(right.shape)}",
    )
    require(A.dtype == B.dtype, f"a product of {A.dtype} and {B.dtype}")
    out = left @ right
    return out if transb else out.view(*B.shape[:-1], out.shape[-1])


def _store(product: Tensor, out: Tensor, accumulate: bool) -> None:
    require(
        product.numel() == out.numel(),
        f"a product of {tuple(product.shape)} for an output of {tuple(out.shape)}",
    )
    product = product.view(out.shape)
    out.copy_(out.to(product.dtype) + product if accumulate else product)
