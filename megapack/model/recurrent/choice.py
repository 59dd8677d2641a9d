"""The kernels of recurrent layers on this machine.

On a GPU flash-linear-attention's, or mamba_ssm's and causal_conv1d's. Torch's run everywhere, and
are slow on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import metadata
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from packaging.version import Version

from megapack import cpu
from megapack.model.recurrent.convolution import (
    ConvolutionKernel,
    dao_convolution,
    fla_convolution,
    torch_convolution,
)
from megapack.model.recurrent.delta_rule import fla_delta_rule, torch_delta_rule
from megapack.model.recurrent.state_space import mamba_state_space, torch_state_space

_LEAST_VERSIONS = {"fla-core": "0.5.0", "mamba-ssm": "2.2.2", "causal-conv1d": "1.4.0"}
"""Distributions of the kernels' packages -> the first version that can run packed rows here.

flash-linear-attention before 0.5 ignores `cu_seqlens_cpu`, and takes as many value heads as there
are key heads: it gives wrong values in silence where there are more.
"""
_DELTA_RULE = ("fla-core",)
_STATE_SPACE = ("mamba-ssm", "causal-conv1d")


class RecurrentKernels(NamedTuple):
    """The kernels of a layer."""

    convolve: ConvolutionKernel
    scan: Callable[..., Any]
    """A `ScanKernel`; that of Mamba-2 once it has `A_H`: [heads], below 0."""


def delta_rule_kernels() -> RecurrentKernels:
    """Those of flash-linear-attention on a GPU that has it, else torch's."""
    if _obstacle(_DELTA_RULE) is None:
        return RecurrentKernels(fla_convolution, fla_delta_rule)
    return RecurrentKernels(torch_convolution, torch_delta_rule)


def state_space_kernels() -> RecurrentKernels:
    """Those of mamba_ssm and causal_conv1d on a GPU that has both, else torch's."""
    if _obstacle(_STATE_SPACE) is None:
        return RecurrentKernels(dao_convolution, mamba_state_space)
    return RecurrentKernels(torch_convolution, torch_state_space)


def recurrent_kernels(pattern: str) -> str:
    """The kernels of a model's recurrent layers, for the log at the start of a run.

    Args:
        pattern: the model's letters, see `ModelConfig.layer_pattern`.

    Returns:
        One line; "" if the model has no recurrent layer.
    """
    kinds = {"G": ("gated delta nets", _DELTA_RULE), "M": ("Mamba-2", _STATE_SPACE)}
    found = [_chosen(*kind) for letter, kind in kinds.items() if letter in pattern]
    return "; ".join(found)


def _chosen(layers: str, packages: Sequence[str]) -> str:
    reason = _obstacle(packages)
    if reason is None:
        return f"{layers} {' and '.join(packages)}"
    return f"{layers} torch{f', which is slow: {reason}' if cpu.uses_cuda() else ''}"


def _obstacle(packages: Sequence[str]) -> str | None:
    """Why kernels of these packages cannot run here; None if they can."""
    if not cpu.uses_cuda():
        return "the device is not CUDA"
    return next(filter(None, map(_unfit, packages)), None)


def _unfit(package: str) -> str | None:
    least = _LEAST_VERSIONS[package]
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        return f"the package {package} is not installed"
    if Version(version) < Version(least):
        return f"{package} is {version}, packed rows need {least}"
    return _triton_obstacle() if package == "fla-core" else None


def _triton_obstacle() -> str | None:
    """Why fla-core's backward refuses to run here; None if it runs.

    On Hopper, Triton 3.4.0 to 3.7.0 give a wrong gradient of a gated chunk (issue 640 of
    flash-linear-attention). fla-core 0.6 raises there, at the first backward, unless tilelang is
    installed.
    """
    if torch.cuda.get_device_capability()[0] != 9 or find_spec("tilelang") is not None:
        return None
    triton = metadata.version("triton")
    if Version("3.4.0") <= Version(triton) < Version("3.7.1"):
        return (
            f"its backward is wrong with Triton {triton} on Hopper; install tilelang, or Triton "
            "3.7.1 or later"
        )
    return None
