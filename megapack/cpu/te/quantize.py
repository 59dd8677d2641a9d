"""Quantized tensors: Transformer Engine's own classes, filled as its kernels fill them.

| quantizer | scales | row-wise data | column-wise data |
|---|---|---|---|
| Float8 (delayed, tensorwise) | one, fp32 | [m, k] | [k, m], where products are TN only |
| Float8Block | of 1 x 128 or 128 x 128 values, fp32 | [m, k] | [k, m], in blocks along m |
| MXFP8 | of 32 values, E8M0 | [m, k] | [m, k], in blocks along m |

Products read data in blocks along the dimension that they contract: row-wise data contract k,
column-wise data m. Hopper's products of FP8 matrices contract the last dimension of both (TN), so
its column-wise data are transposed; Blackwell's take one copy for both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megapack.cpu.te import fp8
from megapack.cpu.te.calls import kernel, refuse, require, version
from megapack.cpu.te.enums import torch_dtype
from megapack.cpu.te.facts import takes_any_layout
from megapack.cpu.te.precision import rows

Parts = Mapping[str, Tensor | None]
"""Attribute of a quantized tensor -> its buffer, None where the tensor keeps none."""

_SIDE = 128
_MX = 32
# The compiled module makes empty tensors too, and quantizes groups of them.
_FIRST_MOVED = (2, 12)


# ------------------------------------------------------------------------------------- quantizing


@kernel
def quantize(tensor: Tensor, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
    """The quantizer's tensor of these values, or `output` with them; unchanged where noop is 1."""
    if output is not None and noop is not None and noop.item() == 1.0:
        return output
    return quantized(tensor, quantizer, tensor.dtype, out=output)


@kernel
def split_quantize(
    tensor: Tensor,
    split_sections: Sequence[int],
    quantizer_list: Sequence[Any],
    disable_bulk_allocation: bool = False,
) -> list[Any]:
    """`quantize` of consecutive rows, each by its quantizer."""
    require(
        sum(split_sections) == len(tensor) and len(split_sections) == len(quantizer_list),
        f"split_quantize: {len(tensor)} rows, parts of {list(split_sections)}, "
        f"{len(quantizer_list)} quantizers",
    )
    parts = tensor.split(list(split_sections))
    return [
        quantized(part, quantizer, part.dtype)
        for part, quantizer in zip(parts, quantizer_list, strict=True)
    ]


@kernel
def bgrad_quantize(input: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    """The gradient of a bias, and the quantized gradient of what it was added to."""
    bias_grad = rows(input).sum(0).to(input.dtype)
    if quantizer is None:
        return bias_grad, input
    return bias_grad, quantized(input, quantizer, input.dtype)


@kernel
def compute_amax(input: Tensor, amax: Tensor) -> None:
    """The largest absolute value, into `amax` [1]."""
    _check_number("amax", amax)
    amax.copy_(fp8.amax(input).view(amax.shape))


def stored(values: Tensor, quantizer: Any, dtype: torch.dtype, out: Any = None) -> Any:
    """What a kernel that computes in fp32 writes: values rounded to `dtype`, or quantized ones.

    Under delayed scaling the kernel quantizes what it computed. Other quantizers read its output in
    `dtype`; current scaling takes the largest value from before this rounding.
    """
    if quantizer is None:
        values = values.to(dtype)
        return values if out is None else out.copy_(values)
    if type(quantizer).__name__ == "Float8Quantizer":
        return quantized(values, quantizer, dtype, out=out)
    return quantized(values.to(dtype), quantizer, dtype, out=out, amax=fp8.amax(values))


def quantized(
    values: Tensor,
    quantizer: Any,
    dtype: torch.dtype,
    *,
    out: Any = None,
    amax: Tensor | None = None,
) -> Any:
    """The quantizer's tensor of these values.

    Args:
        dtype: the type that the tensor presents itself with.
        out: a tensor to fill instead of a new one; its buffers stay.
        amax: the largest absolute value [1], where it is known.

    Raises:
        KernelFault: a shape that the quantizer's kernel does not take.
        NotImplementedError: a quantizer without a stand-in, or a later release.
    """
    if version() >= _FIRST_MOVED:
        release = ".".join(map(str, version()))
        raise NotImplementedError(
            f"FP8 with Transformer Engine {release} is not rehearsed on the CPU; 2.9 to 2.11 are"
        )
    name = type(quantizer).__name__
    refuse(name not in _PARTS, name)
    parts = _PARTS[name](values.detach(), quantizer, amax)
    if out is None:
        out = quantizer.make_empty(values.shape, dtype=dtype, device=values.device)
        if quantizer.internal:
            # The class without torch.Tensor's methods, which modules use for themselves.
            out = type(out).__mro__[1](**out.get_metadata())
    for attribute, buffer in parts.items():
        _keep(out, attribute, buffer)
    if "_transpose" in parts:
        out._transpose_invalid = parts["_transpose"] is None
    return out


def _keep(tensor: Any, attribute: str, values: Tensor | None) -> None:
    """Write a buffer in place, for it may have other owners; make or drop it where that is due."""
    buffer = getattr(tensor, attribute)
    if values is None or buffer is None:
        setattr(tensor, attribute, values)
        return
    require(
        (buffer.shape, buffer.dtype) == (values.shape, values.dtype) and buffer.is_contiguous(),
        f"{type(tensor).__name__}.{attribute} is {tuple(buffer.shape)} of {buffer.dtype} with "
        f"strides {buffer.stride()}, the kernel writes {tuple(values.shape)} of {values.dtype}",
    )
    buffer.copy_(values)


def _delayed(values: Tensor, quantizer: Any, amax: Tensor | None) -> Parts:
    """The scale is that of earlier steps; the largest value goes into the history's first row."""
    _check_number("scale", quantizer.scale)
    _check_number("amax", quantizer.amax)
    largest = fp8.amax(values) if amax is None else amax
    quantizer.amax.copy_(torch.maximum(quantizer.amax, largest.view(quantizer.amax.shape)))
    return _of_one_scale(values, quantizer, quantizer.scale.view(1))


def _current(values: Tensor, quantizer: Any, amax: Tensor | None) -> Parts:
    """The scale is that of these values, or of all ranks' if the quantizer names a group."""
    # Kernels leave an empty tensor alone, and ranks that have one do not join the reduction.
    if values.numel() == 0:
        return _of_one_scale(values, quantizer, torch.ones(1))
    if quantizer.use_existing_amax:
        amax = quantizer.amax
    elif amax is None:
        amax = fp8.amax(values)
    if quantizer.with_amax_reduction:
        amax = amax.clone()
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=quantizer.amax_reduction_group)
    scale = fp8.scale_of(
        amax.view(1),
        torch_dtype(quantizer.dtype),
        power_of_2=quantizer.force_pow_2_scales,
        epsilon=quantizer.amax_epsilon,
    )
    quantizer.amax.copy_(amax)
    quantizer.scale.copy_(scale)
    return _of_one_scale(values, quantizer, scale)


def _of_one_scale(values: Tensor, quantizer: Any, scale: Tensor) -> Parts:
    data = fp8.encode(values, scale, torch_dtype(quantizer.dtype))
    keeps_rows = quantizer.rowwise_usage or takes_any_layout()
    keeps_columns = quantizer.columnwise_usage and not takes_any_layout()
    return {
        "_data": data if keeps_rows else None,
        "_transpose": _transposed(data) if keeps_columns else None,
        "_scale_inv": 1 / scale,
    }


def _blocks(values: Tensor, quantizer: Any, amax: Tensor | None) -> Parts:
    """Blocks of 128: along a row or a column, or squares."""
    require(
        quantizer.force_pow_2_scales or not takes_any_layout(),
        "Blackwell runs products of blocks by MXFP8, whose scales are powers of 2",
    )
    dtype = torch_dtype(quantizer.dtype)
    matrix = rows(values)

    def of(block: fp8.Block) -> tuple[Tensor, Tensor]:
        scale = fp8.scale_of(
            fp8.block_amax(matrix, block),
            dtype,
            power_of_2=quantizer.force_pow_2_scales,
            epsilon=quantizer.amax_epsilon,
            at_most=torch.finfo(values.dtype).max,
        )
        data = fp8.encode(matrix, fp8.spread(scale, block, matrix.shape), dtype)
        return data.view(values.shape), 1 / scale

    # Data that ranks gather stay as they are; others are laid out as products read them.
    is_compact = quantizer.all_gather_usage
    parts: dict[str, Tensor | None] = dict.fromkeys(_BUFFERS)
    if quantizer.block_scaling_dim == 2:
        data, inverse = of((_SIDE, _SIDE))
        row_part = data, fp8.padded(inverse, 1, 4)
        column_part = _transposed(data), fp8.padded(inverse.t(), 1, 4)
    else:
        data, inverse = of((1, _SIDE))
        row_part = data, inverse if is_compact else fp8.padded(inverse.t(), 1, 4)
        data, inverse = of((_SIDE, 1))
        column_part = (
            (data, inverse) if is_compact else (_transposed(data), fp8.padded(inverse, 1, 4))
        )
    if quantizer.rowwise_usage:
        parts["_rowwise_data"], parts["_rowwise_scale_inv"] = row_part
    if quantizer.columnwise_usage:
        parts["_columnwise_data"], parts["_columnwise_scale_inv"] = column_part
    return parts


def _mx_blocks(values: Tensor, quantizer: Any, amax: Tensor | None) -> Parts:
    """Blocks of 32 along rows, and others along columns."""
    matrix = rows(values)
    require(
        matrix.shape[0] % _MX == 0 and matrix.shape[1] % _MX == 0,
        f"MXFP8 of a tensor {tuple(values.shape)}: both sides of the matrix "
        f"{tuple(matrix.shape)} must be multiples of {_MX}",
    )
    dtype = torch_dtype(quantizer.dtype)

    def of(block: fp8.Block) -> tuple[Tensor, Tensor]:
        exponents = fp8.exponents(fp8.block_amax(matrix, block), dtype)
        factors = fp8.spread(fp8.inverse_powers(exponents), block, matrix.shape)
        return fp8.encode(matrix, factors, dtype).view(values.shape), exponents

    parts: dict[str, Tensor | None] = dict.fromkeys(_BUFFERS)
    if quantizer.rowwise_usage:
        data, exponents = of((1, _MX))
        parts["_rowwise_data"] = data
        parts["_rowwise_scale_inv"] = fp8.padded(exponents, 128, 4)
    if quantizer.columnwise_usage:
        data, exponents = of((_MX, 1))
        parts["_columnwise_data"] = data
        parts["_columnwise_scale_inv"] = fp8.padded(exponents, 4, 128)
    return parts


_BUFFERS = (
    *("_rowwise_data", "_rowwise_scale_inv"),
    *("_columnwise_data", "_columnwise_scale_inv"),
)
_PARTS: dict[str, Callable[[Tensor, Any, Tensor | None], Parts]] = {
    "Float8Quantizer": _delayed,
    "Float8CurrentScalingQuantizer": _current,
    "Float8BlockQuantizer": _blocks,
    "MXFP8Quantizer": _mx_blocks,
}


def _transposed(data: Tensor) -> Tensor:
    """[..., k] -> [k, ...]."""
    return data.reshape(-1, data.shape[-1]).t().contiguous().view(data.shape[-1], *data.shape[:-1])


def _check_number(name: str, number: Tensor) -> None:
    require(
        number.numel() == 1 and number.dtype == torch.float32,
        f"the {name} of a quantizer is {tuple(number.shape)} of {number.dtype}, not one of float32",
    )


# --------------------------------------------------------------------------------- reading values


def scaling(tensor: Any) -> str | None:
    """How a tensor is scaled: "tensor", "blocks", "squares" or "mxfp8"; None if it is not FP8."""
    refuse(hasattr(tensor, "_fp4_dtype"), type(tensor).__name__)
    if not hasattr(tensor, "_fp8_dtype"):
        return None
    if hasattr(tensor, "_is_2D_scaled"):
        return "squares" if tensor._is_2D_scaled else "blocks"
    return "tensor" if hasattr(tensor, "_transpose") else "mxfp8"


def matrix_of(tensor: Any, *, rowwise: bool) -> Tensor:
    """The values of a factor of a product, in fp32 (fp64 in fp64): [m, k].

    Args:
        rowwise: whether the product contracts k, and so reads row-wise data; else it contracts m.

    Raises:
        KernelFault: the tensor does not keep these data, or not with these scales.
    """
    kind = scaling(tensor)
    if kind is None:
        return rows(tensor)
    if kind == "tensor":
        return _matrix_of_one_scale(tensor, rowwise)
    side = "rowwise" if rowwise else "columnwise"
    data = getattr(tensor, f"_{side}_data")
    inverse = getattr(tensor, f"_{side}_scale_inv")
    require(
        data is not None and inverse is not None,
        f"a product needs the {side} data of a {type(tensor).__name__}, which keeps none",
    )
    _check_contiguous(tensor, data)
    if kind == "mxfp8":
        return _matrix_of_mx_blocks(tensor, data, inverse, rowwise)
    # Column-wise data are the transposed matrix, in blocks along what are then its rows.
    sizes = (data.shape[:-1], data.shape[-1:]) if rowwise else (data.shape[:1], data.shape[1:])
    m, k = map(math.prod, sizes)
    matrix = fp8.decode(data, torch_dtype(tensor._fp8_dtype)).reshape(m, k)
    if kind == "squares":
        _check_scales(tensor, inverse, (-(-m // _SIDE), _up(-(-k // _SIDE), 4)), torch.float32)
        values = matrix * fp8.spread(inverse, (_SIDE, _SIDE), matrix.shape)
    else:
        _check_scales(tensor, inverse, (-(-k // _SIDE), _up(m, 4)), torch.float32)
        values = matrix * fp8.spread(inverse.t(), (1, _SIDE), matrix.shape)
    return values if rowwise else values.t()


def _matrix_of_one_scale(tensor: Any, rowwise: bool) -> Tensor:
    name = type(tensor).__name__
    transpose = None if tensor._transpose_invalid else tensor._transpose
    reads_transpose = not rowwise
    if takes_any_layout():
        reads_transpose = tensor._data is None
    data: Any = transpose if reads_transpose else tensor._data
    require(
        data is not None,
        f"a product needs the {'rowwise' if rowwise else 'columnwise'} data of a {name}, which "
        "keeps none",
    )
    _check_contiguous(tensor, data)
    _check_scales(tensor, tensor._scale_inv, (1,), torch.float32)
    values = fp8.decode(data, torch_dtype(tensor._fp8_dtype)) * tensor._scale_inv
    return values.flatten(1).t() if reads_transpose else rows(values)


def _matrix_of_mx_blocks(tensor: Any, data: Tensor, inverse: Tensor, rowwise: bool) -> Tensor:
    matrix = rows(fp8.decode(data, torch_dtype(tensor._fp8_dtype)))
    m, k = matrix.shape
    block = (1, _MX) if rowwise else (_MX, 1)
    expected = (_up(m, 128), _up(k // _MX, 4)) if rowwise else (_up(m // _MX, 4), _up(k, 128))
    _check_scales(tensor, inverse, expected, torch.uint8)
    return matrix * fp8.spread(fp8.powers(inverse), block, matrix.shape)


def _up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def _check_contiguous(tensor: Any, data: Tensor) -> None:
    require(
        data.is_contiguous() and data.dtype == torch.uint8,
        f"data of a {type(tensor).__name__}: {data.dtype} with strides {data.stride()}",
    )


def _check_scales(
    tensor: Any, inverse: Tensor, expected: tuple[int, ...], dtype: torch.dtype
) -> None:
    require(
        tuple(inverse.shape) == expected and inverse.dtype == dtype and inverse.is_contiguous(),
        f"scales of a {type(tensor).__name__} are {tuple(inverse.shape)} of {inverse.dtype}, a "
        f"product reads {expected} of {dtype}",
    )


@kernel
def dequantize(input: Any, otype: Any) -> Tensor:
    """The values of a quantized tensor, in its shape."""
    by_rows = getattr(input, "_rowwise_data", None) is not None or scaling(input) == "tensor"
    return matrix_of(input, rowwise=by_rows).to(torch_dtype(otype)).view(input.size())


# -------------------------------------------------------------------------------------- transposes


@kernel
def fp8_transpose(input: Tensor, dtype: Any, *, out: Tensor | None = None) -> Tensor:
    """Bytes [..., k] as [k, ...]."""
    _check_contiguous(input, input)
    transposed = _transposed(input)
    if out is None:
        return transposed
    require(
        out.numel() == transposed.numel() and out.is_contiguous(),
        f"fp8_transpose of {tuple(input.shape)} into {tuple(out.shape)}",
    )
    return out.copy_(transposed.view(out.shape))


@kernel
def swap_first_dims(tensor: Tensor, *, out: Tensor | None = None) -> Tensor:
    """[a, b, ...] as [b, a, ...]."""
    swapped = tensor.transpose(0, 1).contiguous()
    return swapped if out is None else out.copy_(swapped)


# ----------------------------------------------------------------------------------- delayed scales


@kernel
def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer: Tensor,
    amax_histories: Sequence[Tensor],
    scales: Sequence[Tensor],
    amax_compute_algo: str,
    fp8_dtype: Any,
    margin: float,
) -> None:
    """Put this step's largest values, reduced over ranks, into histories, and compute scales.

    Args:
        amax_reduction_buffer: of all quantizers in their order [sum of n]; 0 means that none of
            its tensors was quantized in this step.
        amax_histories: [length, n] of each module. Quantizers write into the first row, which is
            set to 0; the value goes into the last row, and those of earlier steps move up.
        scales: [n] of each module.
        amax_compute_algo: "max" of the history, or its "most_recent".
    """
    numbers = [history.shape[-1] for history in amax_histories]
    require(
        amax_reduction_buffer.numel() == sum(numbers),
        f"{amax_reduction_buffer.numel()} largest values for histories of {numbers} tensors",
    )
    goal = fp8.LARGEST[torch_dtype(fp8_dtype)] / 2**margin
    parts = amax_reduction_buffer.split(numbers)
    for reduced, history, scale in zip(parts, amax_histories, scales, strict=True):
        require(
            history.dim() == 2
            and len(history) == len(amax_histories[0])
            and history.shape[1:] == scale.shape
            and history.is_contiguous()
            and {history.dtype, scale.dtype} == {torch.float32},
            f"a history {tuple(history.shape)} of {history.dtype} for scales "
            f"{tuple(scale.shape)} of {scale.dtype}, the first history is "
            f"{tuple(amax_histories[0].shape)}",
        )
        last = torch.where(reduced != 0, reduced, history[0])
        rolled = torch.cat([history[1:], last[None]])
        largest = {"max": rolled.amax(0), "most_recent": last}[amax_compute_algo]
        rolled[0] = 0
        history.copy_(torch.where(last != 0, rolled, history))
        changes = (last != 0) & largest.isfinite() & (largest > 0)
        new = (goal / largest).clamp_max(torch.finfo(torch.float32).max)
        scale.copy_(torch.where(changes, new, scale))
