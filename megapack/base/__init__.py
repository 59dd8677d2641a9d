"""Shared by all rooms: checked input arrays, files, compiled kernels.

Modules:
    arrays: sample lengths, ids and budgets: checked and turned into arrays
    choices, field_docs: values that a setting may have; the docstrings of dataclass fields
    files: reads that do not block, atomic writes, strict JSON
    garbage: fewer searches for cyclic garbage at the start and while data is read
    jit: `kernel`: numba's njit, cached on disk by the sources of all kernels
    loops: loops over arrays, for kernels
    tables: tables of text
    apex, te: whether the installed apex is NVIDIA's, and Transformer Engine imports
    megatron: what versions of Megatron-Core do
    gpu_environment: environment variables that a run on GPUs wants
"""
