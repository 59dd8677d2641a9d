"""Attention over packed rows: samples never see each other.

packed        what Megatron's layers are given and call
sdpa, varlen  torch's kernels, on a machine without Transformer Engine
choice        which kernel runs on this machine
"""
