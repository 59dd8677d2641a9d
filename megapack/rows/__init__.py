"""Packed rows: the samples of a micro-batch as one token sequence (TE's "THD" layout), and back.

Modules:
    chain: rows that have the pieces of one sample
    packed: micro-batch + samples -> PackedRow
    slices: context-parallel slices of a row
    transfer: rows to a device
    segments: sums over the samples of a row
    schedule_pass: sums and outputs of one run of the schedule
    outputs: per-token values back in sample order; sums of metrics
"""
