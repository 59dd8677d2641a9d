"""Attention in torch's own operations, whose scores exist for a chunk of queries at a time.

For what no fused kernel computes. The backward computes the scores of each chunk again, so that
memory is one chunk's times its keys. A chunk's operations are written once, as a function of its
queries and keys, and autograd finds its gradients:

    def attend(chunk, query, key, value):
        ...                                 # in fp32 at least
        return out, None

    out, _ = by_chunks(attend, paths, heads, [query], [key, value])

Shape suffixes: Q queries and K keys, of a chunk or of the whole row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megapack.model.attention.paths import Paths, seen_QK
from megapack.model.recurrent.scan import at_least_fp32

# Scores of a chunk, over all heads: 64 MiB in fp32. Chosen by hand.
_CHUNK_SCORES = 1 << 24


class Chunk(NamedTuple):
    """Queries of one sequence, against its keys up to the last query's own."""

    queries: slice
    keys: slice

    def hidden_QK(self, device: torch.device, window: int | None = None) -> Tensor:
        """bool: which keys each query may not see; with a window it sees no more than so many."""
        num_queries = self.queries.stop - self.queries.start
        num_keys = self.keys.stop - self.keys.start
        return ~seen_QK(num_queries, num_keys, window, device)


Attend = Callable[..., tuple[Tensor, Tensor | None]]
"""A chunk, its queries and its keys -> the outputs of its queries, and a loss or None."""


def by_chunks(
    attend: Attend,
    paths: Paths,
    heads: int,
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    loss_factor: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The outputs of all queries, one after the other, and the sum of losses; differentiable.

    Args:
        attend: is given tensors in fp32 at least.
        paths: the sequences, whose last query sees the last key.
        heads: scores of a query and a key.
        queries, keys: what belongs to each query, and to each gathered key.
        loss_factor: the gradient of the loss is added with it, whatever becomes of the second
            result.

    Returns:
        The outputs in the dtype of the first queries; the sum, which has no gradient.
    """
    chunks = list(_chunks(paths, heads))
    return _ByChunks.apply(  # type: ignore[no-any-return, no-untyped-call]
        attend, chunks, len(queries), loss_factor, *queries, *keys
    )


class _ByChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        attend: Attend,
        chunks: Sequence[Chunk],
        num_queries: int,
        loss_factor: float,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.arguments = attend, chunks, num_queries, loss_factor
        ctx.save_for_backward(*tensors)
        outs = []
        loss_sum = at_least_fp32(tensors[0].new_zeros(()))
        for chunk in chunks:
            out, loss = attend(chunk, *_parts(chunk, num_queries, tensors))
            outs.append(out.to(tensors[0].dtype))
            if loss is not None:
                loss_sum += loss
        ctx.mark_non_differentiable(loss_sum)
        return torch.cat(outs), loss_sum

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
        attend, chunks, num_queries, loss_factor = ctx.arguments
        tensors = ctx.saved_tensors
        totals = [torch.zeros_like(at_least_fp32(tensor)) for tensor in tensors]
        for chunk in chunks:
            leaves = [x.detach().requires_grad_() for x in _parts(chunk, num_queries, tensors)]
            with torch.enable_grad():
                out, loss = attend(chunk, *leaves)
            roots, factors = [out], [grad[chunk.queries].to(out.dtype)]
            if loss is not None:
                roots.append(loss)
                factors.append(torch.full_like(loss, loss_factor))
            grads = torch.autograd.grad(roots, leaves, factors, materialize_grads=True)
            for total, own in zip(_parts(chunk, num_queries, totals), grads, strict=True):
                total.add_(own)
        pairs = zip(totals, tensors, strict=True)
        return (None, None, None, None, *(total.to(x.dtype) for total, x in pairs))


def _parts(chunk: Chunk, num_queries: int, tensors: Sequence[Tensor]) -> list[Tensor]:
    """A chunk's part of each tensor, of which so many belong to queries and the rest to keys."""
    return [
        at_least_fp32(tensor[chunk.queries if index < num_queries else chunk.keys])
        for index, tensor in enumerate(tensors)
    ]


def _chunks(paths: Paths, heads: int) -> Iterator[Chunk]:
    query = key = 0
    for num_queries, num_keys in zip(paths.num_queries, paths.num_keys, strict=True):
        size = max(1, _CHUNK_SCORES // max(1, num_keys * heads))
        before = num_keys - num_queries
        for first in range(0, num_queries, size):
            last = min(num_queries, first + size)
            yield Chunk(slice(query + first, query + last), slice(key, key + before + last))
        query += num_queries
        key += num_keys
