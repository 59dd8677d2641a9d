"""numba's njit, cached on disk where that is possible.

No fastmath and no parallel reductions: equal inputs give equal bits on every rank and machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numba

# Kernels stand in several rooms.
_PACKAGE = Path(__file__).resolve().parents[1]

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """Compile with numba at the first call; the machine code is kept for later processes.

    numba caches beside the source file, in a user-wide folder where that is read-only, and raises
    where neither can be written: then every process compiles for itself. The error model leaves out
    checks for division by zero, which no kernel needs; machine code is a good deal shorter.
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
    """Tie a kernel's cached code to the sources of all kernels; whether that worked.

    numba looks at the kernel's own file only, yet the code of the kernels that it calls is compiled
    into it: after an upgrade a rank could run old ones, and find another plan than its peers.
    """
    file: Any = getattr(getattr(compiled, "_cache", None), "_cache_file", None)
    if not hasattr(file, "_source_stamp"):
        return False
    file._source_stamp = (file._source_stamp, _sources())
    return True


@cache
def _sources() -> str:
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        source = path.read_bytes()
        if path.name == "jit.py" or b".jit import kernel" in source:
            digest.update(source)
    return digest.hexdigest()
