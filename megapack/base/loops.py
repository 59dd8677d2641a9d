"""Loops over arrays, for kernels that `megapack plan` loads.

What numba has instead makes each process that loads such a kernel import more: `max` and `sum` of
an array look for BLAS in scipy, and assigning an array to a slice needs strings for its error. Both
together are a quarter of the CPU seconds of `megapack plan`.
"""

from __future__ import annotations

from megapack.base.arrays import Floats, Ints
from megapack.base.jit import kernel


@kernel
def largest(values: Floats | Ints) -> float:
    """The largest of one number or more."""
    found: float = values[0]
    for value in values:
        found = max(found, value)
    return found


@kernel
def smallest(values: Floats | Ints) -> float:
    """The smallest of one number or more."""
    found: float = values[0]
    for value in values:
        found = min(found, value)
    return found


@kernel
def copy_into(target: Floats | Ints, source: Floats | Ints) -> None:
    """Write the numbers of `source` into the first places of `target`."""
    for place in range(source.size):
        target[place] = source[place]
