"""Products of 16-bit matrices in fp32: exactness of every path, and which one a machine takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megapack.model import products
from megapack.model.products import add_mm_fp32, has_fp32_products, mm_fp32

pytestmark = pytest.mark.unit

M, K, N = 40, 24, 50


def factors(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    a_MK = torch.randn(M, K, generator=generator).to(dtype)
    b_KN = torch.randn(N, K, generator=generator).to(dtype).t()
    return a_MK, b_KN, torch.randn(M, N, generator=generator)


class CudaTorch:
    """Stands for torch's products on CUDA, where they may write fp32."""

    def __init__(self, version: tuple[int, int]) -> None:
        self.version = version
        self.calls: list[str] = []
        self.mm_of_torch = torch.mm
        self.addmm_of_torch = torch.addmm

    def mm(self, a: Tensor, b: Tensor, **options: Any) -> Tensor:
        if "out_dtype" not in options:
            return self.mm_of_torch(a, b, **options)
        if self.version < (2, 8):
            raise TypeError("mm() got an unexpected keyword argument 'out_dtype'")
        self.calls.append("mm")
        return self.mm_of_torch(a.float(), b.float())

    def addmm(self, total: Tensor, a: Tensor, b: Tensor, **options: Any) -> Tensor:
        if self.version < (2, 8):
            raise TypeError("addmm() got an unexpected keyword argument 'out_dtype'")
        if self.version < (2, 10):
            raise RuntimeError("self and mat2 must have the same dtype, but got Float and BFloat16")
        self.calls.append("addmm")
        return self.addmm_of_torch(total, a.float(), b.float(), out=options["out"])


@pytest.fixture(params=[None, (2, 7), (2, 9), (2, 10)], ids=str)
def machine(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[CudaTorch | None]:
    """This CPU, and a GPU with different versions of torch; blocks of a few rows."""
    fake = None if request.param is None else CudaTorch(request.param)
    monkeypatch.setattr(products, "_BLOCK", 7)
    if fake is not None:
        monkeypatch.setattr(torch, "mm", fake.mm)
        monkeypatch.setattr(torch, "addmm", fake.addmm)
    has_fp32_products.cache_clear()
    yield fake
    has_fp32_products.cache_clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products_are_not_rounded_to_16_bits(machine: CudaTorch | None, dtype: torch.dtype) -> None:
    a_MK, b_KN, _ = factors(dtype)
    exact_MN = a_MK.double() @ b_KN.double()
    product_MN = mm_fp32(a_MK, b_KN)
    assert product_MN.dtype == torch.float32
    torch.testing.assert_close(product_MN.double(), exact_MN, atol=1e-5, rtol=1e-6)
    if dtype == torch.bfloat16:
        assert ((a_MK @ b_KN).double() - exact_MN).abs().max() > 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_are_not_rounded_to_16_bits(machine: CudaTorch | None, dtype: torch.dtype) -> None:
    a_MK, b_KN, sum_MN = factors(dtype)
    exact_MN = sum_MN.double() + a_MK.double() @ b_KN.double()
    add_mm_fp32(sum_MN, a_MK, b_KN)
    torch.testing.assert_close(sum_MN.double(), exact_MN, atol=1e-5, rtol=1e-6)


def test_the_kernels_that_torch_has_are_used(machine: CudaTorch | None) -> None:
    a_MK, b_KN, sum_MN = factors(torch.bfloat16)
    device = a_MK.device
    version = (0, 0) if machine is None else machine.version
    assert has_fp32_products(device, torch.bfloat16) is (version >= (2, 10))
    if machine is None:
        return
    machine.calls.clear()
    mm_fp32(a_MK, b_KN)
    add_mm_fp32(sum_MN, a_MK, b_KN)
    assert machine.calls == (["mm", "addmm"] if version >= (2, 10) else [])
