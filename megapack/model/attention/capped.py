"""Attention over packed rows whose scores are capped (Gemma 2), in torch's own operations.

A score s becomes c * tanh(s / c) before the softmax, of which no fused kernel here has an option.
As in `sparse`, scores exist for a chunk of queries at a time, and again in the backward: with
t = tanh(s / c), P = softmax(c * t) and D = <dO, O> the gradient is

    dS = P * (dO V^T - D) * (1 - t^2)

Shape suffixes: Q queries and K keys, H heads, G groups of them, R heads of a group, D channels of
queries and keys, V of values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megapack.model.attention.paths import Chunk, Paths, query_chunks
from megapack.model.recurrent.scan import at_least_fp32


def capped_attention(
    query_QHD: Tensor,
    key_KGD: Tensor,
    value_KGV: Tensor,
    paths: Paths,
    *,
    cap: float,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Causal attention of each sequence of `paths`, whose last query sees its last key.

    Args:
        query_QHD: queries of all sequences, one after the other.
        key_KGD, value_KGV: gathered keys and values of all sequences.
        cap: limit of a score's absolute value.
        scale: factor of the scores before they are capped.
        window: keys that a query sees, its own and those before it; None = all.

    Returns:
        [Q, H, V].
    """
    call = _Call(paths, cap, scale, window)
    out: Tensor = _Capped.apply(query_QHD, key_KGD, value_KGV, call)  # type: ignore[no-untyped-call]
    return out


class _Call(NamedTuple):
    paths: Paths
    cap: float
    scale: float
    window: int | None


class _Capped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: _Call) -> Tensor:
        out_QHV = query.new_empty(*query.shape[:2], value.shape[-1])
        for chunk in query_chunks(call.paths, query.shape[1]):
            probs_GRQK, _ = _probabilities(query, key, chunk, call)
            out_GRQV = probs_GRQK @ _keys(value, chunk)
            out_QHV[chunk.queries] = _by_query(out_GRQV).to(out_QHV.dtype)
        ctx.save_for_backward(query, key, value, out_QHV)
        ctx.call = call
        return out_QHV

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out = ctx.saved_tensors
        call = ctx.call
        groups = key.shape[1]
        grads = [torch.zeros_like(at_least_fp32(x)) for x in (query, key, value)]
        for chunk in query_chunks(call.paths, query.shape[1]):
            probs_GRQK, tanh_GRQK = _probabilities(query, key, chunk, call)
            q, g, o = (_queries(x, chunk, groups) for x in (query, grad, out))
            k, v = (_keys(x, chunk) for x in (key, value))
            grads[2][chunk.keys] += _by_key(probs_GRQK, g)
            slopes_GRQK = g @ v.transpose(-1, -2) - (g * o).sum(-1, keepdim=True)
            slopes_GRQK *= probs_GRQK * (1 - tanh_GRQK.square()) * call.scale
            grads[0][chunk.queries] = _by_query(slopes_GRQK @ k)
            grads[1][chunk.keys] += _by_key(slopes_GRQK, q)
        pairs = zip(grads, (query, key, value), strict=True)
        return *(total.to(x.dtype) for total, x in pairs), None


def _probabilities(query: Tensor, key: Tensor, chunk: Chunk, call: _Call) -> tuple[Tensor, Tensor]:
    """Each query's softmax over its keys, and the scores' tanh, both [G, R, Q, K]."""
    scores = _queries(query, chunk, key.shape[1]) @ _keys(key, chunk).transpose(-1, -2)
    tanh_GRQK = scores.mul_(call.scale / call.cap).tanh_()
    hidden_QK = ~chunk.visible_QK(query.device, call.window)
    probs_GRQK = (tanh_GRQK * call.cap).masked_fill_(hidden_QK, -torch.inf).softmax(-1)
    return probs_GRQK, tanh_GRQK


def _queries(x_QHD: Tensor, chunk: Chunk, groups: int) -> Tensor:
    """The chunk's queries, by groups of heads: [G, R, Q, D]."""
    by_group = torch.unflatten(at_least_fp32(x_QHD[chunk.queries]), 1, (groups, -1))
    return by_group.permute(1, 2, 0, 3)


def _keys(x_KGD: Tensor, chunk: Chunk) -> Tensor:
    """The chunk's keys, for all heads of a group: [G, 1, K, D]."""
    return at_least_fp32(x_KGD[chunk.keys]).transpose(0, 1)[:, None]


def _by_query(x_GRQD: Tensor) -> Tensor:
    """[G, R, Q, D] -> [Q, H, D]."""
    return x_GRQD.permute(2, 0, 1, 3).flatten(1, 2)


def _by_key(weights_GRQK: Tensor, x_GRQD: Tensor) -> Tensor:
    """The sum over queries and heads of a group: [K, G, D]."""
    return torch.einsum("grqk,grqd->kgd", weights_GRQK, x_GRQD)
