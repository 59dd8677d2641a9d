"""Products of 16-bit matrices whose results are fp32, without rounding them to 16 bits between.

A 16-bit product rounds each element: bf16 keeps 8 bits, so a logit of 20 is rounded to a multiple
of 0.125. Both functions multiply exactly and add in fp32:

- CUDA, torch 2.10 and later: the product writes fp32 (`out_dtype`), or adds to fp32.
- Elsewhere (a CPU, older torch): both factors are widened to fp32, a block of the large one at a
  time.
- fp32 factors: torch's product.

Shape suffixes: M, N rows and columns of the result; K what is summed over.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

# Rows or columns of the result that are computed at a time where factors are widened. A block of
# 8,192 tokens of a vocabulary of hidden size 2,560 takes 84 MB in fp32, the whole 151,936 1.6 GB.
_BLOCK = 8192


def mm_fp32(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """The product in fp32, [M, N]; both factors have the same dtype."""
    if a_MK.dtype == torch.float32:
        return a_MK @ b_KN
    if has_fp32_products(a_MK.device, a_MK.dtype):
        return torch.mm(a_MK, b_KN, out_dtype=torch.float32)
    result_MN = a_MK.new_empty((a_MK.shape[0], b_KN.shape[1]), dtype=torch.float32)
    wide_MK = a_MK.float()
    for block in _blocks(b_KN.shape[1]):
        torch.mm(wide_MK, b_KN[:, block].float(), out=result_MN[:, block])
    return result_MN


def add_mm_fp32(sum_MN: Tensor, a_MK: Tensor, b_KN: Tensor) -> None:
    """Add the product to an fp32 matrix in place; no second [M, N] is allocated."""
    if a_MK.dtype == torch.float32:
        sum_MN.addmm_(a_MK, b_KN)
    elif has_fp32_products(a_MK.device, a_MK.dtype):
        torch.addmm(sum_MN, a_MK, b_KN, out_dtype=torch.float32, out=sum_MN)
    else:
        wide_KN = b_KN.float()
        for block in _blocks(sum_MN.shape[0]):
            sum_MN[block].addmm_(a_MK[block].float(), wide_KN)


@functools.cache
def has_fp32_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's kernels add the product of two matrices of this 16-bit dtype to an fp32 one.

    torch 2.10 and later do on CUDA; 2.8 and 2.9 have the argument and refuse the sum. Asked by
    trying, because a torch that has the argument may lack the kernel of a device.
    """
    ones = torch.ones(16, 16, device=device, dtype=dtype)
    total = torch.ones(16, 16, device=device, dtype=torch.float32)
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except (TypeError, RuntimeError):
        return False
    return bool((total == 17).all())


def _blocks(size: int) -> Iterator[slice]:
    return (slice(start, start + _BLOCK) for start in range(0, size, _BLOCK))
