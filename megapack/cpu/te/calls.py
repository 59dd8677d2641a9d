"""What all stand-ins have in common: a name, a count of calls, checks, arguments by release."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from megapack.errors import MegapackError

Kernel = Callable[..., Any]
Around = Callable[[str, Kernel, tuple[Any, ...], dict[str, Any]], Any]

KERNELS: dict[str, Kernel] = {}
"""Name in Transformer Engine's compiled module, or of a Triton kernel -> its stand-in."""

COUNTS: collections.Counter[str] = collections.Counter()
"""Calls of each stand-in in this process."""

_around: list[Around] = []
_version: list[tuple[int, ...]] = [(2, 11)]


class KernelFault(MegapackError, RuntimeError):
    """A call with which a kernel on a GPU would read past its tensors or compute something else."""


def require(holds: bool, fault: str) -> None:
    """Check what a kernel takes for granted.

    Raises:
        KernelFault: it does not hold.
    """
    if not holds:
        raise KernelFault(fault)


def refuse(wanted: bool, what: str) -> None:
    """Say by name what has no stand-in.

    Raises:
        NotImplementedError: it is wanted.
    """
    if wanted:
        raise NotImplementedError(f"{what} is not rehearsed on the CPU")


@contextmanager
def around(function: Around) -> Iterator[None]:
    """Within the block, `function(name, run, args, kwargs)` runs every stand-in by `run(*args)`."""
    _around.append(function)
    try:
        yield
    finally:
        _around.remove(function)


def set_version(version: tuple[int, ...]) -> None:
    """Use the arguments' order of this release of Transformer Engine."""
    _version[0] = version


def version() -> tuple[int, ...]:
    """The release of Transformer Engine whose Python runs, such as (2, 11)."""
    return _version[0]


def kernel(
    function: Kernel | None = None, *, orders: Mapping[tuple[int, ...], str] | None = None
) -> Any:
    """Register a stand-in under its function's name.

    Args:
        orders: first release of Transformer Engine -> names of positional arguments, where their
            order is not that of the function.
    """
    if function is None:
        return functools.partial(kernel, orders=orders)
    stand_in = function
    name = function.__name__

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        COUNTS[name] += 1
        names = _names(orders or {})
        if names:
            kwargs |= dict(zip(names, args, strict=False))
            args = ()
        # Kernels know nothing of autograd.
        with torch.no_grad():
            if _around:
                return _around[-1](name, stand_in, args, kwargs)
            return stand_in(*args, **kwargs)

    call.__module__ = "transformer_engine_torch"
    KERNELS[name] = call
    return call


def _names(orders: Mapping[tuple[int, ...], str]) -> list[str]:
    first = max((release for release in orders if release <= _version[0]), default=None)
    return [] if first is None else orders[first].split()
