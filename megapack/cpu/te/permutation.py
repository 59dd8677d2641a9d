"""Permutation of tokens by expert: the Triton kernels of `transformer_engine.pytorch.triton`.

A row map [tokens, experts] holds the row of a token's copy for an expert, or -1; rows are ordered
by expert. (The kernels keep the same facts in another form, [tokens, 2 * experts + 1].)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megapack.cpu.te.calls import kernel, refuse, require
from megapack.cpu.te.precision import wide


@kernel
def make_row_id_map(routing_map: Tensor, num_tokens: int, num_experts: int) -> Tensor:
    """The row map of a routing map [tokens, experts]."""
    require(
        routing_map.shape == (num_tokens, num_experts),
        f"a routing map {tuple(routing_map.shape)} of {num_tokens} tokens, {num_experts} experts",
    )
    chosen = routing_map.bool().t().contiguous()
    rows = torch.full((num_experts, num_tokens), -1, dtype=torch.int32)
    rows[chosen] = torch.arange(int(chosen.sum()), dtype=torch.int32)
    return rows.t().contiguous()


@kernel(
    "inp row_id_map probs scale pad_offsets@2.12 num_tokens num_experts num_out_tokens hidden_size "
    "scale_hidden_dim"
)
def permute_with_mask_map(
    *,
    inp: Tensor,
    row_id_map: Tensor,
    probs: Tensor | None,
    scale: Tensor | None,
    num_out_tokens: int,
    hidden_size: int,
    pad_offsets: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None, Tensor | None]:
    """Copies of tokens [num_out_tokens, h] by expert, no scales, and copies of probabilities."""
    refuse(scale is not None, "permutation of FP8 rows")
    token, expert, rows = _copies(row_id_map, pad_offsets)
    require(
        len(rows) == num_out_tokens, f"{len(rows)} routed copies, num_out_tokens={num_out_tokens}"
    )
    out = inp.new_empty(num_out_tokens, hidden_size)
    out[rows] = inp[token]
    permuted = None
    if probs is not None:
        permuted = probs.new_empty(num_out_tokens)
        permuted[rows] = probs[token, expert]
    return out, None, permuted


@kernel(
    "inp row_id_map merging_probs permuted_probs pad_offsets@2.12 num_tokens num_experts "
    "hidden_size"
)
def unpermute_with_mask_map(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None,
    permuted_probs: Tensor | None,
    num_tokens: int,
    num_experts: int,
    hidden_size: int,
    pad_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Sums of a token's copies [tokens, h], weighted by `merging_probs`; its probabilities."""
    token, expert, rows = _copies(row_id_map, pad_offsets)
    values = wide(inp[rows])
    if merging_probs is not None:
        values = values * wide(merging_probs[token, expert])[:, None]
    out = values.new_zeros(num_tokens, hidden_size).index_add_(0, token, values)
    probs = None
    if permuted_probs is not None:
        probs = permuted_probs.new_zeros(num_tokens, num_experts)
        probs[token, expert] = permuted_probs[rows]
    return out.to(inp.dtype), probs


@kernel(
    "fwd_output_grad row_id_map fwd_input merging_probs pad_offsets@2.12 num_tokens num_experts "
    "num_out_tokens hidden_size"
)
def unpermute_with_mask_map_bwd_with_merging_probs(
    *,
    fwd_output_grad: Tensor,
    row_id_map: Tensor,
    fwd_input: Tensor,
    merging_probs: Tensor,
    num_out_tokens: int,
    hidden_size: int,
    pad_offsets: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Gradients of the copies and of `merging_probs`."""
    token, expert, rows = _copies(row_id_map, pad_offsets)
    grad = wide(fwd_output_grad[token])
    copies = fwd_output_grad.new_zeros(num_out_tokens, hidden_size)
    weighted = grad * wide(merging_probs[token, expert])[:, None]
    copies[rows] = weighted.to(copies.dtype)
    probs = torch.zeros_like(merging_probs)
    probs[token, expert] = (grad * wide(fwd_input[rows])).sum(-1).to(probs.dtype)
    return copies, probs


@kernel
def make_chunk_sort_map(
    split_sizes: Tensor, sorted_indices: Tensor, num_tokens: int, num_splits: int
) -> Tensor:
    """Where each row goes if chunks of these sizes are put into this order."""
    sizes = split_sizes.tolist()
    require(sum(sizes) == num_tokens, f"chunks of {sum(sizes)} rows, {num_tokens} rows")
    chunks = torch.arange(num_tokens).split(sizes)
    source = torch.cat([chunks[i] for i in sorted_indices.tolist()])
    where = torch.empty(num_tokens, dtype=torch.int32)
    where[source] = torch.arange(num_tokens, dtype=torch.int32)
    return where


@kernel
def sort_chunks_by_map(
    inp: Tensor,
    row_id_map: Tensor,
    probs: Tensor | None,
    num_tokens: int,
    hidden_size: int,
    is_forward: bool,
) -> tuple[Tensor, Tensor | None]:
    """Rows, and their probabilities, in the map's order; backward, in the order before it."""
    rows = row_id_map.long()
    rows = rows.argsort() if is_forward else rows
    return inp[rows], None if probs is None else probs[rows]


def _copies(row_id_map: Tensor, pad_offsets: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Token, expert and row of each routed copy."""
    refuse(pad_offsets is not None, "permutation that also pads experts")
    token, expert = (row_id_map >= 0).nonzero(as_tuple=True)
    return token, expert, row_id_map[token, expert].long()
