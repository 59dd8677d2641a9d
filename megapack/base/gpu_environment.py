"""Environment variables that make a run on GPUs faster, as recipes of Megatron-Bridge set them.

A process reads them when it first uses CUDA, so they are set before torch is imported.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
ALLOCATORS = (ALLOCATOR, "PYTORCH_ALLOC_CONF")
"""The names under which torch reads its allocator's settings; the second since torch 2.9."""

EXPANDABLE = "expandable_segments:True"
"""Segments that grow. Rows of ever-changing lengths otherwise leave gaps that no later row fits."""

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"

# Compute capability of Blackwell (B200: 10.0). Before it, a collective that is launched before a
# matrix product starts before it only if both go through one hardware queue.
_BLACKWELL = (10, 0)


def missing_variables(
    environment: Mapping[str, str], *, tp: int, cp: int, capability: tuple[int, int] | None
) -> dict[str, str]:
    """The variables to set for a run with this layout; what is set already stays as it is.

    Args:
        environment: the variables of the process.
        tp, cp: tensor- and context-parallel size.
        capability: compute capability of the GPU; None = not known.
    """
    wanted = {}
    if not any(name in environment for name in ALLOCATORS):
        wanted[ALLOCATOR] = EXPANDABLE
    is_older = capability is not None and capability < _BLACKWELL
    if is_older and max(tp, cp) > 1 and CONNECTIONS not in environment:
        wanted[CONNECTIONS] = "1"
    return wanted


def set_missing_variables(*, tp: int, cp: int) -> None:
    """Set `missing_variables` in this process, for the GPU of this machine."""
    capability = compute_capability()
    os.environ.update(missing_variables(os.environ, tp=tp, cp=cp, capability=capability))


def compute_capability() -> tuple[int, int] | None:
    """Compute capability of this machine's first GPU, from NVML; None without its library or a GPU.

    torch and the CUDA runtime would answer too, but would read the variables above first.
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    device = ctypes.c_void_p()
    major = ctypes.c_int()
    minor = ctypes.c_int()
    if nvml.nvmlInit_v2() != 0:
        return None
    try:
        failed = nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device))
        failed = failed or nvml.nvmlDeviceGetCudaComputeCapability(
            device, ctypes.byref(major), ctypes.byref(minor)
        )
    finally:
        nvml.nvmlShutdown()
    return None if failed else (major.value, minor.value)
