"""Packed rows: a micro-batch's samples as one sequence of tensors (TE's "THD" layout), and back.

packed     Plan + samples -> PackedRow
slices     context-parallel parts of a row
segments   where each sample lies in a row
outputs    per-token values back to sample order; sums of metrics
"""
