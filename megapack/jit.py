"""numba's njit, cached on disk where that is possible.

No fastmath and no parallel reductions: equal inputs give equal bits on every rank and machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """Compile with numba at the first call; the machine code is kept for later processes.

    numba caches beside the source file, in a user-wide folder where that is read-only, and raises
    where neither can be written: then every process compiles for itself. The error model leaves out
    checks for division by zero, which no kernel needs; machine code is a good deal shorter.
    """
    try:
        return numba.njit(cache=True, error_model="numpy")(function)  # type: ignore[no-any-return]
    except RuntimeError as error:
        if "cache" not in str(error):
            raise
        return numba.njit(error_model="numpy")(function)  # type: ignore[no-any-return]
