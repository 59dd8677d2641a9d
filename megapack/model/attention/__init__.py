"""Attention over packed rows, in which samples never see each other.

Modules:
    row: what attention reads of a row, computed once for all layers
    packed: Megatron's description of a row; the base class of the kernels below
    sdpa, varlen: torch's kernels, for machines without Transformer Engine
    paths: the keys of each sequence, for shared prefixes, earlier pieces and context parallelism
    chunked, capped, sparse: scores in chunks, where no fused kernel computes what is needed
    rotary: rotary embeddings with one table per row
    rotary_tables: several tables in a chunk, for layers or for samples by their length
    own_heads: layers with other heads than the rest, and norms of values
    te_rows: all kinds of rows in layers with Transformer Engine's attention
    te_backend: what Transformer Engine would run
    choice: the kernel that runs on this machine
"""
