"""`kernel`: numba's njit, with machine code that the processes of a machine share on disk.

Kernels use neither fastmath nor parallel reductions, so that equal inputs give equal bits on every
rank and machine. As plain Python they give the same bits too, many times slower: with numba's own
NUMBA_DISABLE_JIT=1.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import IO, Any, TypeVar

from megapack.errors import ConfigError

try:
    import numba
    from numba.core import caching
    from numba.core.registry import CPUDispatcher
    from numba.core.runtime import rtsys
except ImportError as error:
    raise ConfigError(f"numba cannot be imported: {error}; install one that fits") from None

logger = logging.getLogger(__name__)

# The whole package, because kernels are defined in several rooms.
_PACKAGE = Path(__file__).resolve().parents[1]

# Machine code of old sources is kept for a month: another checkout of a branch may need it again.
_MAX_AGE_S = 30 * 24 * 3600.0

# In the cache folder.
_LOCK_NAME = "megapack-compiling.lock"

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """Compile with numba at the first call, and cache the machine code for later processes.

    One process of a machine compiles, and the others wait for it. If the cache cannot be written,
    every process compiles for itself. The numpy error model omits checks for division by zero. No
    kernel needs them, and the machine code is much shorter. Python's lock is released while a
    kernel runs.
    """
    return _compiled(function, is_inner=False)


def inner(function: F) -> F:
    """A kernel that other kernels call. What Python needs to call its machine code is left out, a
    third of the compile time; Python runs the source."""
    return _compiled(function, is_inner=True)


def _compiled(function: F, *, is_inner: bool) -> F:
    compiled = numba.njit(
        error_model="numpy", nogil=True, no_cfunc_wrapper=True, no_cpython_wrapper=is_inner
    )(function)
    if compiled is function:
        # NUMBA_DISABLE_JIT is set.
        return function
    if is_inner:
        compiled.__class__ = _InnerDispatcher
    _call_without_literals(compiled)
    if can_store():
        with contextlib.suppress(RuntimeError):
            _share(compiled)
    return compiled  # type: ignore[no-any-return]


class _InnerDispatcher(CPUDispatcher):  # type: ignore[misc]
    """What numba knows of an inner kernel; a call by Python would jump to nowhere."""

    def __call__(self, *args: Any) -> Any:
        """Run the source."""
        return self.py_func(*args)


def _call_without_literals(compiled: Any) -> None:
    """Let kernels that pass a literal call the same machine code as those that pass a variable.

    numba compiles `f(0)` once more for `Literal[int](0)`: a tenth of the planner's compile time.
    """
    template_of = compiled.get_call_template

    def get_call_template(args: Any, kws: Any) -> Any:
        kws = {name: numba.types.unliteral(kind) for name, kind in kws.items()}
        return template_of([numba.types.unliteral(kind) for kind in args], kws)

    compiled.get_call_template = get_call_template


@cache
def _say_once() -> None:
    """Tell why nothing happens for a while; of a job's processes the first one does."""
    if os.environ.get("RANK", "0") == "0":
        logger.warning(
            "compiling the planner's kernels, once per machine: up to a minute "
            "(`megapack warm-up` does it beforehand)"
        )


class _SharedCache(caching.FunctionCache):  # type: ignore[misc]
    """numba's cache of one kernel, whose misses are compiled by one process of a machine."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled kernel; on a miss, the lock is held until `_compiling` ends."""
        # numba's own method first loads all that it needs to compile, a quarter of a second.
        # Compiled code needs the functions that count references of arrays.
        rtsys.initialize(target_context)
        compiled = self._load_overload(sig, target_context)
        if compiled is None:
            target_context.refresh()
            _say_once()
            _lock.acquire()
            # Another process may have compiled it before this one had the lock.
            compiled = self._load_overload(sig, target_context)
        return compiled

    def save_overload(self, sig: Any, data: Any) -> None:
        """Write the compiled kernel."""
        super().save_overload(sig, data)
        _forget_old_sources()


def _share(compiled: Any) -> None:
    """Give a kernel the shared cache, and release the lock when a compilation ends."""
    with _numba_folder(cache_folder()):
        compiled._cache = _SharedCache(compiled.py_func)
    compile_now = compiled.compile

    def compile_once(sig: Any) -> Any:
        with _compiling():
            return compile_now(sig)

    compiled.compile = compile_once


@contextlib.contextmanager
def _numba_folder(folder: Path) -> Iterator[None]:
    """Within the block, numba makes caches in this folder; those of other packages stay theirs."""
    given = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(folder)
    try:
        yield
    finally:
        numba.config.CACHE_DIR = given


_thread_lock = threading.RLock()
_depths = [0]


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    """A compilation; those of the kernels that it calls are within it, and keep the lock."""
    with _thread_lock:
        _depths[0] += 1
        try:
            yield
        finally:
            _depths[0] -= 1
            if _depths[0] == 0:
                _lock.release()


class _Lock:
    """A file that the system unlocks when the process that locked it ends, however it ends.

    Without locks (Windows, some network file systems) each process compiles for itself.
    """

    _file: IO[str] | None = None

    def acquire(self) -> None:
        """Wait for the lock; does nothing if this process has it."""
        if self._file is None:
            with contextlib.suppress(ImportError, OSError):
                import fcntl

                self._file = open(cache_folder() / _LOCK_NAME, "a", encoding="utf-8")  # noqa: SIM115
                fcntl.flock(self._file, fcntl.LOCK_EX)

    def release(self) -> None:
        """Let the next process have it."""
        if self._file is not None:
            self._file.close()
        self._file = None


_lock = _Lock()


@cache
def _forget_old_sources() -> None:
    """Remove machine code of other sources of this copy that nobody has added to for a month."""
    own = cache_folder()
    for other in own.parent.iterdir():
        with contextlib.suppress(OSError):
            if other != own and time.time() - other.stat().st_mtime > _MAX_AGE_S:
                shutil.rmtree(other)


@cache
def cache_folder() -> Path:
    """Where the user keeps the machine code of this copy of the package and of its sources.

    It is in NUMBA_CACHE_DIR, or else in XDG_CACHE_HOME or ~/.cache. Beside the sources, pip would
    leave it when it removes the package, and Python would import the folders that are left.

    The sources of all kernels decide the folder. numba checks a kernel's own file only, but the
    kernels that it calls are compiled into it: after an upgrade, a rank could run an old one and
    make a different plan than its peers. It also fails to read an index that names a class which
    the new sources do not have.

    Raises:
        RuntimeError: the user has no home folder.
    """
    given = numba.config.CACHE_DIR or os.environ.get("XDG_CACHE_HOME")
    copy = hashlib.sha256(os.fsencode(_PACKAGE)).hexdigest()[:16]
    base = Path(given or Path("~/.cache").expanduser()).absolute()
    return base / "megapack" / copy / _sources()[:16]


@cache
def can_store() -> bool:
    """Whether machine code can be stored; if not, a line of the log says so."""
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        if not os.access(cache_folder(), os.W_OK):
            raise PermissionError(f"{cache_folder()} is not writable")
    except (OSError, RuntimeError) as error:
        logger.warning(
            "compiled code cannot be stored (%s), so every process compiles the planner again, up "
            "to a minute; set NUMBA_CACHE_DIR to a writable folder",
            error,
        )
        return False
    return True


@cache
def _sources() -> str:
    """Digest of this file and of all files that define kernels."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        source = path.read_bytes()
        if path.name == "jit.py" or b"base.jit import " in source:
            digest.update(source)
    return digest.hexdigest()
