"""Attention over packed rows, in which samples never see each other.

Modules:
    packed: Megatron's description of a row; the base class of the kernels below
    sdpa, varlen: torch's kernels, for machines without Transformer Engine
    choice: the kernel that runs on this machine
"""
