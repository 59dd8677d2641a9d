"""Kernels are compiled, and cached until the source of any kernel changes."""

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


def test_kernels_compile_if_no_cache_folder_is_writable(monkeypatch: pytest.MonkeyPatch) -> None:
    njit = numba.njit

    def without_cache(*args: Any, cache: bool = False, **options: Any) -> Any:
        if cache:
            raise RuntimeError("cannot cache function '_double': no locator available")
        return njit(*args, **options)

    monkeypatch.setattr(numba, "njit", without_cache)
    assert kernel(_double)(21) == 42


def test_other_numba_errors_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> Any:
        raise RuntimeError("no LLVM")

    monkeypatch.setattr(numba, "njit", broken)
    with pytest.raises(RuntimeError, match="no LLVM"):
        kernel(_double)


def test_a_changed_kernel_of_another_room_clears_the_cache(tmp_path: Path) -> None:
    """A kernel must not run the old code of a kernel that it calls, whatever folder that is in."""
    package = tmp_path / "pack"
    for room in ("base", "callee", "caller"):
        (package / room).mkdir(parents=True)
    (package / "base" / "jit.py").write_text(Path(jit.__file__).read_text(encoding="utf-8"))
    (package / "caller" / "outer.py").write_text(
        "from pack.base.jit import kernel\nfrom pack.callee.inner import inner\n\n"
        "@kernel\ndef outer(x: int) -> int:\n    return inner(x)\n"
    )
    found = []
    for factor in (2, 3):
        (package / "callee" / "inner.py").write_text(
            "from pack.base.jit import kernel\n\n"
            f"@kernel\ndef inner(x: int) -> int:\n    return {factor} * x\n"
        )
        found += [_call_outer(tmp_path) for _ in range(2)]
    assert [result for result, _, _ in found] == [2, 2, 3, 3]
    assert [num_cache_hits for _, num_cache_hits, _ in found] == [0, 1, 0, 1]
    stamps = [stamp for _, _, stamp in found]
    assert stamps[0] == stamps[1] != stamps[2] == stamps[3]


def _call_outer(folder: Path) -> tuple[int, int, str]:
    """outer(1), its cache hits and its stamp, in a new process."""
    code = (
        "from pack.caller.outer import outer\n"
        "print(outer(1), sum(outer.stats.cache_hits.values()))\n"
        "print(outer._cache._cache_file._source_stamp)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True
    )
    numbers, stamp = run.stdout.splitlines()
    result, num_cache_hits = numbers.split()
    return int(result), int(num_cache_hits), stamp


def test_nothing_is_cached_without_a_stamp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "_stamp", lambda compiled: False)
    doubled = kernel(_double)
    assert doubled(4) == 8
    assert doubled.stats.cache_path is None
