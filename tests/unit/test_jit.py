from __future__ import annotations

from typing import Any

import numba
import pytest

from megapack.jit import kernel

pytestmark = pytest.mark.unit


def _double(value: int) -> int:
    return 2 * value


def test_kernels_compile_where_nothing_can_be_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    njit = numba.njit

    def without_cache(*args: Any, cache: bool = False, **options: Any) -> Any:
        if cache:
            raise RuntimeError("cannot cache function '_double': no locator available")
        return njit(*args, **options)

    monkeypatch.setattr(numba, "njit", without_cache)
    assert kernel(_double)(21) == 42


def test_other_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> Any:
        raise RuntimeError("no LLVM")

    monkeypatch.setattr(numba, "njit", broken)
    with pytest.raises(RuntimeError, match="no LLVM"):
        kernel(_double)
