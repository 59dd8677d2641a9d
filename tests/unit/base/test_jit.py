"""Kernels are compiled, and cached until the source of any kernel changes."""

from __future__ import annotations

import fcntl
import os
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


def test_warm_up_refuses_a_folder_that_cannot_be_written(pack: Path) -> None:
    code = "from megapack.cli import main; print(main(['warm-up']))"
    out, said = _start(pack, code, NUMBA_CACHE_DIR="/dev/null").communicate()
    assert out == "2\n"
    assert "Not a directory" in said
    assert "nothing to compile ahead" in said


# Prints the result, and the kernels that were compiled, which are counted as misses of the cache.
_CALL = (
    "from pack.caller.outer import inner, outer\n"
    "print('ready', flush=True)\n"
    "print(outer(1), *(sum(k.stats.cache_misses.values()) for k in (outer, inner)))\n"
)


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    """A package that compiles as megapack does: `outer` calls `inner` of another room."""
    package = tmp_path / "pack"
    for room in ("base", "callee", "caller"):
        (package / room).mkdir(parents=True)
    (package / "base" / "jit.py").write_text(Path(jit.__file__).read_text(encoding="utf-8"))
    (package / "caller" / "outer.py").write_text(
        "from pack.base.jit import kernel\nfrom pack.callee.inner import inner\n\n"
        "@kernel\ndef outer(x: int) -> int:\n    return inner(x) + inner(1)\n"
    )
    _write_inner(package, factor=2)
    return package


def _write_inner(package: Path, factor: int) -> None:
    """A kernel, and one that it calls with an object of a class that is named for the factor."""
    (package / "callee" / "inner.py").write_text(
        "from typing import NamedTuple\nfrom pack.base.jit import kernel\n\n"
        f"class Times{factor}(NamedTuple):\n    factor: int\n\n"
        "@kernel\ndef scaled(x: int, by: NamedTuple) -> int:\n    return by.factor * x\n\n"
        f"@kernel\ndef inner(x: int) -> int:\n    return scaled(x, Times{factor}({factor}))\n"
    )


def _start(package: Path, code: str = _CALL, **folders: str) -> subprocess.Popen[str]:
    """A new process in which only these variables tell folders of caches."""
    unset = ("HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR", "NUMBA_DISABLE_JIT")
    environment = {key: text for key, text in os.environ.items() if key not in unset}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=package.parent,
        # A source that changes within a second, at the same size, keeps its .pyc.
        env={**environment, **folders, "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("folders", "chosen"),
    [
        ({"HOME": "home"}, "home/.cache"),
        pytest.param({"HOME": "home", "XDG_CACHE_HOME": "xdg"}, "xdg", marks=pytest.mark.weekly),
        ({"XDG_CACHE_HOME": "xdg", "NUMBA_CACHE_DIR": "numba"}, "numba"),
    ],
)
def test_compiled_code_is_in_the_users_cache_and_not_beside_the_sources(
    pack: Path, folders: dict[str, str], chosen: str
) -> None:
    """pip does not remove what it did not install, and Python imports folders that are left."""
    _start(pack, **{key: str(pack.parent / name) for key, name in folders.items()}).communicate()
    (folder,) = (pack.parent / chosen / "megapack").glob("*/*")
    stored = {path.name.split("-")[0] for path in folder.glob("*/*.nbi")}
    assert stored == {"outer.outer", "inner.inner", "inner.scaled"}
    assert {path.suffix for path in pack.rglob("*.*")} <= {".py", ".pyc"}


def test_without_a_writable_folder_each_process_compiles_and_says_so_once(pack: Path) -> None:
    out, said = _start(pack, NUMBA_CACHE_DIR="/dev/null").communicate()
    assert out.startswith("ready\n4 1 ")
    assert said.count("\n") == said.count("set NUMBA_CACHE_DIR to a writable folder") == 1


@pytest.mark.weekly
def test_a_changed_kernel_of_another_room_has_code_of_its_own(pack: Path) -> None:
    """A kernel must not run the old code of a kernel that it calls, whatever folder that is in.

    The sources before had a class that these ones do not have.
    """
    found = []
    for factor in (2, 2, 3, 3, 2):
        _write_inner(pack, factor)
        _, call = _start(pack, HOME=str(pack.parent)).communicate()[0].splitlines()
        result, misses, _ = map(int, call.split())
        found.append((result, misses))
    assert found == [(4, 1), (4, 0), (6, 1), (6, 0), (4, 0)]


@pytest.mark.weekly
def test_code_of_old_sources_is_removed_after_a_month(pack: Path) -> None:
    for factor in (2, 3, 4):
        _write_inner(pack, factor)
        before = {*pack.parent.glob(".cache/megapack/*/*")}
        _start(pack, HOME=str(pack.parent)).communicate()
        (made,) = {*pack.parent.glob(".cache/megapack/*/*")} - before
        if factor == 2:
            old = made
            os.utime(made, (0, 0))
    assert not old.exists()
    assert len([*pack.parent.glob(".cache/megapack/*/*")]) == 2


def test_cold_processes_compile_a_kernel_once(pack: Path) -> None:
    """Both miss the cache; the one that gets the lock compiles, and the other loads its code."""
    runs = [_start(pack, XDG_CACHE_HOME=str(pack.parent)) for _ in range(2)]
    found = sorted(run.communicate()[0].split()[2:] for run in runs)
    # `inner` takes a variable and the constant 1, which numba compiles as one kernel or two.
    assert found[0] == ["0", "0"]
    assert found[1][0] == "1"
    assert int(found[1][1]) >= 1


def test_a_kernel_that_does_not_compile_leaves_the_lock_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(jit, "cache_folder", lambda: tmp_path)

    def wrong(value: int) -> int:
        return value.nothing  # type: ignore[attr-defined]

    with pytest.raises(numba.TypingError):
        kernel(wrong)(1)
    with open(tmp_path / jit._LOCK_NAME) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_without_locks_each_process_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "cache_folder", lambda: Path("/dev/null"))
    lock = jit._Lock()
    lock.acquire()
    lock.release()


def test_without_compiling_kernels_are_the_functions_themselves(tmp_path: Path) -> None:
    code = "from megapack.base.jit import kernel\ndef f(): pass\nprint(kernel(f) is f)"
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout == "True\n"


def test_a_numba_that_does_not_import_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "numba.py").write_text("raise ImportError('Numba needs NumPy 2.3 or less')\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.getcwd()}"}
    run = subprocess.run(
        [sys.executable, "-m", "megapack", "plan", "a.csv", "--max-tokens-per-gpu", "8"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stdout) == (2, "")
    (line,) = run.stderr.splitlines()
    assert "Numba needs NumPy 2.3 or less; install one that fits" in line


def test_a_process_that_compiles_says_so_once(pack: Path) -> None:
    """Of a job's processes the first one does; one that loads compiled code says nothing."""
    line = "compiling the planner's kernels, once per machine: up to a minute"
    for rank, cache, times in (("0", "a", 1), ("0", "a", 0), ("1", "b", 0)):
        folder = str(pack.parent / cache)
        _, said = _start(pack, NUMBA_CACHE_DIR=folder, RANK=rank).communicate()
        assert said.count("\n") == said.count(line) == times


def test_a_literal_and_a_variable_call_the_same_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(jit, "cache_folder", lambda: tmp_path)

    double: Any = kernel(_double)

    @kernel
    def both(value: int) -> int:
        return int(double(value) + double(3))

    assert both(1) == 8
    assert len(double.signatures) == 1
