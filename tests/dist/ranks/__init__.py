"""Faults of ranks, process groups and NCCL's rules."""
