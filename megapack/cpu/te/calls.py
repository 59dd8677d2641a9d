"""What all stand-ins have in common: a name, a count of calls, checks, arguments by release."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterator
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


def kernel(given: Kernel | str) -> Any:
    """Register a stand-in under its function's name.

    Args:
        given: the function, or the order of its positional arguments, where that is not the
            function's: names, of which "name@2.12" exists since a release and "name@<2.15" before.
    """
    if isinstance(given, str):
        return functools.partial(_registered, given)
    return _registered("", given)


def _registered(order: str, stand_in: Kernel) -> Kernel:
    name = stand_in.__name__

    @functools.wraps(stand_in)
    def call(*args: Any, **kwargs: Any) -> Any:
        COUNTS[name] += 1
        if order:
            kwargs |= dict(zip(_names(order), args, strict=False))
            args = ()
        # Kernels know nothing of autograd.
        with torch.no_grad():
            if _around:
                return _around[-1](name, stand_in, args, kwargs)
            return stand_in(*args, **kwargs)

    call.__module__ = "transformer_engine_torch"
    KERNELS[name] = call
    return call


def _names(order: str) -> list[str]:
    """The arguments that the release has."""
    names = []
    for word in order.split():
        name, _, release = word.partition("@")
        bound = tuple(map(int, release.lstrip("<").split("."))) if release else (0,)
        if (_version[0] < bound) == release.startswith("<"):
            names.append(name)
    return names
