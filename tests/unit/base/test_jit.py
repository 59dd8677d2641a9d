from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numba
import pytest

from megapack.base import jit
from megapack.base.jit import kernel

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


def test_cached_code_depends_on_all_kernels(tmp_path: Path) -> None:
    """A kernel that calls another must not run the other's old code from the cache."""
    (tmp_path / "pack").mkdir()
    package = tmp_path / "pack"
    source = Path(jit.__file__).read_text(encoding="utf-8")
    (package / "__init__.py").write_text("")
    (package / "jit.py").write_text(source)
    (package / "outer.py").write_text(
        "from pack.inner import inner\nfrom pack.jit import kernel\n\n"
        "@kernel\ndef outer(x: int) -> int:\n    return inner(x)\n"
    )
    answers = []
    for factor in (2, 3):
        (package / "inner.py").write_text(
            "from pack.jit import kernel\n\n"
            f"@kernel\ndef inner(x: int) -> int:\n    return {factor} * x\n"
        )
        for _ in range(2):
            code = (
                "from pack.outer import outer\n"
                "print(outer(1), sum(outer.stats.cache_hits.values()))"
            )
            run = subprocess.run(
                [sys.executable, "-c", code],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                check=True,
            )
            answers.append(run.stdout.strip())
    assert answers == ["2 0", "2 1", "3 0", "3 1"]


def test_without_a_stamp_nothing_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "_stamp", lambda compiled: False)
    doubled = kernel(_double)
    assert doubled(4) == 8
    assert doubled.stats.cache_path is None
