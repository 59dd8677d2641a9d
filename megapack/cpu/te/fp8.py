"""Rounding to FP8: bytes of values, scales, and blocks of values that share a scale."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
Block = tuple[int, int]
"""Rows and columns of values that share a scale."""
# Bits of fp32: 1 sign, 8 of the exponent, which is biased by 127, and 23 of the mantissa.
_MANTISSA_BITS = 23


def encode(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes of `values * scale`, rounded to nearest; what is too large becomes the largest."""
    largest = LARGEST[dtype]
    return (values.float() * scale).clamp(-largest, largest).to(dtype).view(torch.uint8)


def decode(data: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of bytes, in fp32; exact."""
    return data.view(dtype).float()


def amax(values: Tensor) -> Tensor:
    """The largest absolute value [1]. Kernels compare by fmaxf, which passes over NaN."""
    return _magnitudes(values).max().view(1) if values.numel() else torch.zeros(1)


def block_amax(matrix: Tensor, block: Block) -> Tensor:
    """`amax` of each block: [m, k] -> [ceil(m / rows), ceil(k / columns)]."""
    rows, columns = block
    m, k = matrix.shape
    filled = F.pad(_magnitudes(matrix), (0, -k % columns, 0, -m % rows))
    return filled.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).amax((1, 3))


def _magnitudes(values: Tensor) -> Tensor:
    return values.float().abs().nan_to_num(nan=0.0, posinf=torch.inf)


def spread(scales: Tensor, block: Block, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """Each value's scale [m, k]; scales of more blocks than the matrix has are passed over."""
    rows, columns = block
    each = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return each[: shape[0], : shape[1]]


def scale_of(
    largest: Tensor,
    dtype: torch.dtype,
    *,
    power_of_2: bool = False,
    epsilon: float = 0.0,
    at_most: float = torch.finfo(torch.float32).max,
) -> Tensor:
    """Scales that bring absolute values of at most `largest` to the range of the FP8 type.

    An amax of 3.5 gives 448 / 3.5 = 128 for e4m3. An amax of 0 or infinity gives 1.

    Args:
        power_of_2: round down to a power of 2.
        epsilon: the least amax.
        at_most: the scale of an amax so small that the quotient is infinite.
    """
    largest = largest.clamp_min(epsilon)
    scale = (LARGEST[dtype] / largest).clamp_max(at_most)
    if power_of_2:
        scale = (scale.view(torch.int32) & -(1 << _MANTISSA_BITS)).view(torch.float32)
    return torch.where(largest.isfinite() & (largest > 0), scale, 1.0)


def exponents(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """E8M0 bytes of blocks: 127 + ceil(log2(amax / largest FP8 value)).

    An amax of 448 gives 127 (a factor of 1) for e4m3, one of 449 gives 128 (a factor of 2).
    """
    bits = (largest * torch.tensor(1 / LARGEST[dtype])).view(torch.int32)
    exponent = bits >> _MANTISSA_BITS
    mantissa = bits & (1 << _MANTISSA_BITS) - 1
    # 2**-127 is below fp32's normal numbers: there it is half of the mantissa's range.
    is_exact = (mantissa == 0) | ((exponent == 0) & (mantissa <= 1 << _MANTISSA_BITS - 1))
    up = torch.where(is_exact | (exponent == 254), exponent, exponent + 1)
    return torch.where(largest.isinf(), 254, up).to(torch.uint8)


def powers(exponent: Tensor) -> Tensor:
    """The factors of E8M0 bytes, 2 ** (byte - 127): the byte is fp32's exponent."""
    return (exponent.int() << _MANTISSA_BITS).view(torch.float32)


def inverse_powers(exponent: Tensor) -> Tensor:
    """What values are multiplied by: 2 ** (127 - byte), and 1 in blocks of zeros, whose byte is 0.

    The byte of a block with an infinity is 254, and the kernel's factor is then 0, not 2**-127.
    """
    return torch.where(exponent == 0, 1.0, powers(254 - exponent.int()))


def padded(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """The matrix with zeros to multiples of `rows` and `columns`, as products read scales."""
    m, k = matrix.shape
    return F.pad(matrix, (0, -k % columns, 0, -m % rows)).contiguous()
