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


@kernel
def get_stream_priority_range() -> tuple[int, int]:
    """Lowest and highest priority of a stream."""
    return 0, -5


@kernel
def device_supports_multicast(device_id: int = -1) -> bool:
    """Whether user buffers could use NVLink's multicast."""
    return False


@kernel
def ubuf_built_with_mpi() -> bool:
    """Whether user buffers start with MPI."""
    return False
