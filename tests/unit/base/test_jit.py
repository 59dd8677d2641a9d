"""Kernels are compiled, and cached until the source of any kernel changes."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numba
import pytest

from megapack.base import jit
from megapack.base.jit import kernel
from megapack.base.machine_lock import MachineLock
from megapack.cli import main

pytestmark = pytest.mark.unit


def _double(value: int) -> int:
    return 2 * value


def test_kernels_compile_if_no_cache_folder_is_writable(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_cache(compiled: Any) -> None:
        raise RuntimeError("cannot cache function '_double': no locator available")

    monkeypatch.setattr(jit, "_share", without_cache)
    doubled = kernel(_double)
    assert doubled(21) == 42
    assert doubled.stats.cache_path is None


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


def test_cold_processes_compile_a_kernel_once(tmp_path: Path) -> None:
    """Both miss the cache; the one that gets the lock compiles, and the other loads its code."""
    package = tmp_path / "pack"
    (package / "base").mkdir(parents=True)
    (package / "base" / "jit.py").write_text(Path(jit.__file__).read_text(encoding="utf-8"))
    (package / "twice.py").write_text(
        "from pack.base.jit import kernel\n\n"
        "@kernel\ndef inner(x: int) -> int:\n    return 2 * x\n\n"
        "@kernel\ndef outer(x: int) -> int:\n    return inner(x) + inner(1)\n"
    )
    code = (
        "from pack.twice import inner, outer\n"
        "from pack.base import jit\n"
        "print('ready', flush=True)\n"
        "outer(1)\n"
        "print(sum(outer.stats.cache_misses.values()), sum(inner.stats.cache_misses.values()))\n"
        "print(jit._lock().waited_s > 0, sorted(jit._CompiledList().names()))"
    )
    lock = MachineLock(package / "base" / "__pycache__" / jit._LOCK_NAME, "is a test")
    lock.acquire()
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    for run in runs:
        assert run.stdout is not None
        assert run.stdout.readline() == "ready\n"
    lock.release()
    found = sorted(run.communicate()[0].splitlines() for run in runs)
    misses = [[int(number) for number in lines[0].split()] for lines in found]
    # `inner` takes a variable and the constant 1, which numba compiles as one kernel or two.
    assert misses[0] == [0, 0]
    assert misses[1][0] == 1
    assert misses[1][1] >= 1
    assert all(lines[1].endswith("['pack.twice.inner', 'pack.twice.outer']") for lines in found)


def test_a_kernel_that_does_not_compile_leaves_the_lock_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lock = MachineLock(tmp_path / "lock", "is a test")
    monkeypatch.setattr(jit, "_lock", cache(lambda: lock))
    monkeypatch.setattr(jit, "cache_folder", lambda: tmp_path)

    def wrong(value: int) -> int:
        return value.nothing  # type: ignore[attr-defined]

    with pytest.raises(numba.TypingError):
        kernel(wrong)(1)
    other = MachineLock(tmp_path / "lock", "is a test")
    other.acquire()
    assert other.waited_s == 0
    other.release()


def test_without_compiling_kernels_are_the_functions_themselves(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from megapack.base.jit import compiles, kernel\n"
        "print(kernel(len) is len, compiles(), 'numba' in sys.modules)"
    )
    environment = {**os.environ, "MEGAPACK_COMPILE": "off"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout == "True False False\n"


def test_a_cold_machine_plans_without_compiling(tmp_path: Path) -> None:
    """The same plan, and a line that says so. A machine that has compiled says nothing."""
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("\n".join(str(100 + 37 * i % 1000) for i in range(64)))
    line = ["plan", str(lengths), "--dp", "2", "--pp", "2", "--vpp", "2"]
    line += ["--max-tokens-per-gpu", "4096"]
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    environment.pop("MEGAPACK_COMPILE", None)
    cold = subprocess.run(
        [sys.executable, "-m", "megapack", *line, "-o", str(tmp_path / "plan.json")],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "the planner is not compiled on this machine" in cold.stderr
    assert not list((tmp_path / "cache").rglob("*.nbi"))
    assert main([*line, "-o", str(tmp_path / "compiled.json")]) == 0
    plans = [(tmp_path / name).read_text() for name in ("plan.json", "compiled.json")]
    assert plans[0] == plans[1]
