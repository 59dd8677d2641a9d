"""What all stand-ins have in common: a name, checks, arguments by release."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megapack.errors import MegapackError

Kernel = Callable[..., Any]

KERNELS: dict[str, Kernel] = {}
"""Name in Transformer Engine's compiled module, or of a Triton kernel -> its stand-in."""

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


def run(name: str, stand_in: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a stand-in; a rehearsal watches them by putting its own function in this place."""
    return stand_in(*args, **kwargs)


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
        if order:
            kwargs |= dict(zip(_names(order), args, strict=False))
            args = ()
        # Kernels know nothing of autograd.
        with torch.no_grad():
            return run(name, stand_in, args, kwargs)

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
