"""Attention in blocks that are merged exactly: rows with shared prefixes or pieces on a CPU.

A block is a run of queries against a run of keys: causal in itself, or full. A branch of a row
attends causally to itself. The positions that continue it are one run right after it, and attend to
all of it: one full block per prefix, whatever the depth of the tree. With context parallelism, a
part of a branch attends causally to itself and fully to what is before it in the branch. A piece of
a sample, and what continues it, attends fully to the keys that the row carries, which are before
its own. So no block needs a mask.

Two blocks of one query merge by their log-sum-exps: with l = logaddexp(l1, l2), the output is
exp(l1 - l) o1 + exp(l2 - l) o2. A kernel's log-sum-exp carries no gradient, so autograd must not
run through this sum. The backward of flash attention (Dao et al. 2022, arXiv 2205.14135, algorithm
4) reads the output and log-sum-exp only as those of the whole softmax: P = exp(s - l) and
D = <dO, O>. Given the merged ones, each block's backward returns its part of the gradient.

Shape suffixes: Q queries of this rank, K keys of the row, H heads, G groups of key and value heads,
D channels.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from megapack.model.attention.paths import chunk_ends
from megapack.prefixes import EARLIER, Branch

_ATEN = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Block:
    """`count` batches of queries, one after the other, each against as many keys."""

    first_query: int
    num_queries: int
    """Of each batch."""
    first_key: int
    num_keys: int
    """Of each batch."""
    causal: bool
    """Each query attends to the keys up to its own; else to all of them."""
    count: int = 1


def attention_blocks(
    padded_lengths: Sequence[int],
    branches: Sequence[Branch],
    *,
    carried: Sequence[int] = (),
    cp: int = 1,
    cp_rank: int = 0,
) -> list[Block]:
    """The blocks of a row, the causal ones first; these have each query once.

    Args:
        padded_lengths: tokens of each branch of the row, and of its dummies.
        branches: those of the row.
        carried: padded tokens that each earlier row has kept.
        cp: number of context-parallel ranks.
        cp_rank: this rank among them; its queries are those of `rows.slices.slice_positions`.
    """
    causal: list[Block] = []
    # Where the row's keys begin.
    own = sum(carried)
    full = [
        Block(branch.start // cp, (branch.end - branch.start) // cp, 0, own, causal=False)
        for branch in branches
        if branch.parent == EARLIER
    ]
    start = 0
    for tokens in padded_lengths:
        chunk = tokens // (2 * cp) if cp > 1 else tokens
        query = start // cp
        for end in chunk_ends(tokens, cp, cp_rank):
            before = end - chunk
            _add_causal(causal, Block(query, chunk, own + start + before, chunk, causal=True))
            if before:
                full.append(Block(query, chunk, own + start, before, causal=False))
            query += chunk
        start += tokens
    for branch in branches:
        first = branch.start + branch.tokens
        if branch.end > first:
            queries = (branch.end - first) // cp
            keys = own + branch.start
            full.append(Block(first // cp, queries, keys, branch.tokens, causal=False))
    return causal + full


def _add_causal(blocks: list[Block], block: Block) -> None:
    """Append a block; neighbours of one length become batches of one block."""
    last = blocks[-1] if blocks else None
    if (
        last is not None
        and last.num_queries == block.num_queries
        and last.first_query + last.count * last.num_queries == block.first_query
        and last.first_key + last.count * last.num_keys == block.first_key
    ):
        blocks[-1] = Block(
            last.first_query, last.num_queries, last.first_key, last.num_keys, True, last.count + 1
        )
    else:
        blocks.append(block)


def merged_attention(
    query_QHD: Tensor, key_KGD: Tensor, value_KGD: Tensor, blocks: Sequence[Block], scale: float
) -> Tensor:
    """Softmax over all keys of the blocks that a query is in; differentiable. CPU tensors only.

    Args:
        query_QHD: H is a multiple of G.
        key_KGD, value_KGD: values may be narrower than keys.
        blocks: see `attention_blocks`.
        scale: softmax scale.

    Returns:
        [Q, H, channels of a value].
    """
    heads = query_QHD.shape[1]
    if key_KGD.shape[1] < heads and not _takes_fewer_key_heads():
        repeats = heads // key_KGD.shape[1]
        key_KGD, value_KGD = (x.repeat_interleave(repeats, 1) for x in (key_KGD, value_KGD))
    width = value_KGD.shape[-1]
    if width < key_KGD.shape[-1]:
        # The kernel takes one width. Further channels of zeros are zeros in the result.
        value_KGD = torch.nn.functional.pad(value_KGD, (0, key_KGD.shape[-1] - width))
    out: Tensor = _Merged.apply(query_QHD, key_KGD, value_KGD, blocks, scale)  # type: ignore[no-untyped-call]
    return out[..., :width]


@functools.cache
def _takes_fewer_key_heads() -> bool:
    """Before 2.9 torch's kernel for the CPU reads past the end of fewer key than query heads."""
    return Version(torch.__version__) >= Version("2.9")


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[Block], scale: float
    ) -> Tensor:
        # Merged in at least fp32: the sum of two bf16 outputs would be rounded twice.
        wide = torch.promote_types(query.dtype, torch.float32)
        out_QHD = torch.empty(query.shape, dtype=wide)
        lse_QH = torch.empty(query.shape[:2], dtype=wide)
        for block in blocks:
            q, k, v = _batches(block, query, key, value)
            o, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, block.causal, scale=scale
            )
            own = slice(block.first_query, block.first_query + block.count * block.num_queries)
            own_out = o.transpose(1, 2).flatten(0, 1)
            own_lse = lse.transpose(1, 2).flatten(0, 1).to(wide)
            if block.causal:
                out_QHD[own] = own_out
                lse_QH[own] = own_lse
                continue
            total = torch.logaddexp(lse_QH[own], own_lse)
            out_QHD[own].mul_((lse_QH[own] - total).exp_()[..., None])
            out_QHD[own].addcmul_(own_out.to(wide), (own_lse - total).exp_()[..., None])
            lse_QH[own] = total
        out = out_QHD.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse_QH)
        ctx.blocks = blocks
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        wide = lse.dtype
        grads = [torch.zeros(x.shape, dtype=wide) for x in (query, key, value)]
        for block in ctx.blocks:
            q, k, v = _batches(block, query, key, value)
            g, o, own_lse = _query_batches(block, grad, out, lse[..., None])
            parts = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
                g, q, k, v, o, own_lse[..., 0], 0.0, block.causal, scale=ctx.scale
            )
            for total, part, (first, size) in zip(
                grads, parts, (_queries(block), _keys(block), _keys(block)), strict=True
            ):
                total[first : first + size] += part.transpose(1, 2).flatten(0, 1)
        grad_q, grad_k, grad_v = (
            total.to(x.dtype) for total, x in zip(grads, (query, key, value), strict=True)
        )
        return grad_q, grad_k, grad_v, None, None


def _queries(block: Block) -> tuple[int, int]:
    return block.first_query, block.count * block.num_queries


def _keys(block: Block) -> tuple[int, int]:
    return block.first_key, block.count * block.num_keys


def _query_batches(block: Block, *tensors: Tensor) -> list[Tensor]:
    """The block's queries of tensors [Q, H, x] as [count, H, queries, x]."""
    first, size = _queries(block)
    shape = (block.count, block.num_queries)
    return [torch.unflatten(x[first : first + size], 0, shape).transpose(1, 2) for x in tensors]


def _batches(block: Block, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """The block's queries, keys and values as [count, heads, tokens, channels]."""
    first, size = _keys(block)
    shape = (block.count, block.num_keys)
    pair = (
        torch.unflatten(x[first : first + size], 0, shape).transpose(1, 2) for x in (key, value)
    )
    return [*_query_batches(block, query), *pair]
