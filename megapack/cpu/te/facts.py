"""Facts that Transformer Engine asks of its libraries."""

from __future__ import annotations

from megapack.cpu.te.calls import kernel


@kernel
def get_cudnn_version() -> int:
    """9.13.0: after 9.10, which had faults in packed rows, and before 9.18, which changed some."""
    return 91300


@kernel
def get_cublasLt_version() -> int:
    """cuBLAS of CUDA 13.0."""
    return 130000


@kernel
def get_num_cublas_streams() -> int:
    """Streams of grouped products."""
    return 4
