"""The kernels of recurrent layers on this machine."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from megapack import cpu
from megapack.model.recurrent.convolution import (
    ConvolutionKernel,
    dao_convolution,
    fla_convolution,
    torch_convolution,
)
from megapack.model.recurrent.delta_rule import fla_delta_rule, torch_delta_rule
from megapack.model.recurrent.scan import ScanKernel
from megapack.model.recurrent.state_space import (
    StateSpaceKernel,
    mamba_state_space,
    torch_state_space,
)


@dataclass(frozen=True)
class DeltaRuleKernels:
    """The kernels of a gated delta net."""

    convolve: ConvolutionKernel
    scan: ScanKernel


@dataclass(frozen=True)
class StateSpaceKernels:
    """The kernels of a Mamba-2 layer."""

    convolve: ConvolutionKernel
    scan: StateSpaceKernel


def delta_rule_kernels() -> DeltaRuleKernels:
    """Those of flash-linear-attention on a GPU that has it, else torch's."""
    if cpu.uses_cuda() and _has("fla"):
        return DeltaRuleKernels(fla_convolution, fla_delta_rule)
    return DeltaRuleKernels(torch_convolution, torch_delta_rule)


def state_space_kernels() -> StateSpaceKernels:
    """Those of mamba_ssm and causal_conv1d on a GPU that has both, else torch's."""
    if cpu.uses_cuda() and _has("mamba_ssm") and _has("causal_conv1d"):
        return StateSpaceKernels(dao_convolution, mamba_state_space)
    return StateSpaceKernels(torch_convolution, torch_state_space)


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
