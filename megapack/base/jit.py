"""`kernel`: numba's njit, cached on disk where possible.

Kernels use neither fastmath nor parallel reductions, so that equal inputs give equal bits on every
rank and machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numba

# The whole package, because kernels are defined in several rooms.
_PACKAGE = Path(__file__).resolve().parents[1]

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """Compile with numba at the first call, and cache the machine code for later processes.

    numba caches beside the source file, or in a user-wide folder if that is read-only. It raises if
    neither can be written; then every process compiles for itself. The numpy error model omits
    checks for division by zero. No kernel needs them, and the machine code is much shorter.
    """
    try:
        compiled = numba.njit(cache=True, error_model="numpy")(function)
    except RuntimeError as error:
        if "cache" not in str(error):
            raise
    else:
        if _stamp(compiled):
            return compiled  # type: ignore[no-any-return]
    return numba.njit(error_model="numpy")(function)  # type: ignore[no-any-return]


def _stamp(compiled: Any) -> bool:
    """Make a kernel's cache entry depend on the sources of all kernels; False if that failed.

    numba checks the kernel's own file only, but the kernels that it calls are compiled into it.
    After an upgrade, a rank could run an old one from its cache and make a different plan than its
    peers. numba has no public way to extend a cache entry's stamp, so the private field is
    replaced. A numba without that field gets no cache.
    """
    file: Any = getattr(getattr(compiled, "_cache", None), "_cache_file", None)
    if not hasattr(file, "_source_stamp"):
        return False
    file._source_stamp = (file._source_stamp, _sources())
    return True


@cache
def _sources() -> str:
    """Digest of this file and of all files that define kernels."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        source = path.read_bytes()
        if path.name == "jit.py" or b".jit import kernel" in source:
            digest.update(source)
    return digest.hexdigest()
