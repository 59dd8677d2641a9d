"""Permutation of tokens by expert, and padding of the experts' rows.

The permutations are the Triton kernels of `transformer_engine.pytorch.triton`.

A row map [tokens, experts] holds the row of a token's copy for an expert, or -1; rows are ordered
by expert. (The kernels keep the same facts in another form, [tokens, 2 * experts + 1].)
"""

from __future__ import annotations

from collections.abc import Sequence
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


_PADS = "permutation that also pads experts"
_FORWARD = "inp row_id_map probs scale {}num_tokens num_experts num_out_tokens hidden_size {}"


@kernel(
    orders={
        (2, 9): _FORWARD.format("", "scale_hidden_dim"),
        (2, 12): _FORWARD.format("pad_offsets ", "scale_hidden_dim"),
    }
)
def permute_with_mask_map(
    inp: Tensor,
    row_id_map: Tensor,
    probs: Tensor | None,
    scale: Tensor | None,
    num_tokens: int,
    num_experts: int,
    num_out_tokens: int,
    hidden_size: int,
    scale_hidden_dim: int,
    pad_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Copies of tokens [num_out_tokens, h] by expert; also of block scales and probabilities."""
    refuse(pad_offsets is not None, _PADS)
    token, expert, rows = _copies(row_id_map)
    require(
        len(rows) == num_out_tokens,
        f"{len(rows)} routed copies, num_out_tokens={num_out_tokens}",
    )
    out = inp.new_empty(num_out_tokens, hidden_size)
    out[rows] = inp[token]
    scales, permuted = None, None
    if scale is not None:
        scales = scale.new_empty(num_out_tokens, scale_hidden_dim)
        scales[rows] = scale[token]
    if probs is not None:
        permuted = probs.new_empty(num_out_tokens)
        permuted[rows] = probs[token, expert]
    return out, scales, permuted


_BACK = "inp row_id_map merging_probs permuted_probs {}num_tokens num_experts hidden_size"


@kernel(orders={(2, 9): _BACK.format(""), (2, 12): _BACK.format("pad_offsets ")})
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
    refuse(pad_offsets is not None, _PADS)
    token, expert, rows = _copies(row_id_map)
    values = wide(inp[rows])
    if merging_probs is not None:
        values = values * wide(merging_probs[token, expert])[:, None]
    out = values.new_zeros(num_tokens, hidden_size).index_add_(0, token, values)
    probs = None
    if permuted_probs is not None:
        probs = permuted_probs.new_zeros(num_tokens, num_experts)
        probs[token, expert] = permuted_probs[rows]
    return out.to(inp.dtype), probs


_BACKWARD = (
    "fwd_output_grad row_id_map fwd_input merging_probs {}num_tokens num_experts num_out_tokens "
    "hidden_size"
)


@kernel(orders={(2, 9): _BACKWARD.format(""), (2, 12): _BACKWARD.format("pad_offsets ")})
def unpermute_with_mask_map_bwd_with_merging_probs(
    fwd_output_grad: Tensor,
    row_id_map: Tensor,
    fwd_input: Tensor,
    merging_probs: Tensor,
    num_tokens: int,
    num_experts: int,
    num_out_tokens: int,
    hidden_size: int,
    pad_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of the copies and of `merging_probs`."""
    refuse(pad_offsets is not None, _PADS)
    token, expert, rows = _copies(row_id_map)
    grad = wide(fwd_output_grad[token])
    copies = fwd_output_grad.new_zeros(num_out_tokens, hidden_size)
    weighted = grad * wide(merging_probs[token, expert])[:, None]
    copies[rows] = weighted.to(copies.dtype)
    probs = merging_probs.new_zeros(num_tokens, num_experts)
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

    def moved(values: Any) -> Tensor:
        out = torch.empty_like(values)
        if is_forward:
            out[rows] = values
        else:
            out.copy_(values[rows])
        return out

    return moved(inp), None if probs is None else moved(probs)


def _copies(row_id_map: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Token, expert and row of each routed copy."""
    token, expert = (row_id_map >= 0).nonzero(as_tuple=True)
    return token, expert, row_id_map[token, expert].long()


@kernel
def fused_multi_row_padding(
    input: Tensor, output: Tensor, input_rows: Sequence[int], padded_rows: Sequence[int]
) -> None:
    """Each expert's rows, with zeros after them up to its number of padded rows."""
    _check_padding(input, output, input_rows, padded_rows, is_padding=True)
    output.zero_()
    targets = output.split(list(padded_rows))
    for source, target in zip(input.split(list(input_rows)), targets, strict=True):
        target[: len(source)] = source


@kernel
def fused_multi_row_unpadding(
    input: Tensor, output: Tensor, padded_rows: Sequence[int], output_rows: Sequence[int]
) -> None:
    """Each expert's rows without the padding after them."""
    _check_padding(output, input, output_rows, padded_rows, is_padding=False)
    targets = output.split(list(output_rows))
    for source, target in zip(input.split(list(padded_rows)), targets, strict=True):
        target.copy_(source[: len(target)])


def _check_padding(
    real: Tensor,
    padded: Tensor,
    real_rows: Sequence[int],
    padded_rows: Sequence[int],
    *,
    is_padding: bool,
) -> None:
    require(
        sum(real_rows) == len(real)
        and sum(padded_rows) == len(padded)
        and all(n <= p for n, p in zip(real_rows, padded_rows, strict=True)),
        f"padding of experts: {list(real_rows)} of {len(real)} rows to {list(padded_rows)} of "
        f"{len(padded)}",
    )
    require(
        real.is_contiguous() and padded.is_contiguous() and real.dtype == padded.dtype,
        f"padding of experts: {real.dtype} with strides {real.stride()}, {padded.dtype} with "
        f"strides {padded.stride()}",
    )
    # The kernel passes over experts without rows, and would leave their padding as it finds it.
    require(
        not is_padding or all(n or not p for n, p in zip(real_rows, padded_rows, strict=True)),
        f"padding of experts without rows: {list(real_rows)} to {list(padded_rows)}",
    )


TRITON_NAMES = (
    "make_row_id_map",
    "permute_with_mask_map",
    "unpermute_with_mask_map",
    "unpermute_with_mask_map_bwd_with_merging_probs",
    "make_chunk_sort_map",
    "sort_chunks_by_map",
)
