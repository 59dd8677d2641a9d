"""torch's flash attention over packed rows in torch's own operations, forward and backward.

The backward is algorithm 4 of the paper (arXiv:2205.14135). It computes the scores again, from the
output and the log-sum-exp that it is given, so a caller that changes both (sinks) gets from it
what it would get from the kernel. Half precision is computed in fp32, as the kernel accumulates.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def register_on_cpu() -> torch.library.Library:
    """Run aten's two flash operations on a CPU for as long as the result lives."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", flash_forward, "CPU")
    library.impl("_flash_attention_backward", flash_backward, "CPU")
    return library


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float,
    window_size_left: int,
    window_size_right: int,
) -> tuple[Tensor, ...]:
    """aten's `_flash_attention_forward`: outputs, and log-sum-exps [heads, queries]."""
    assert dropout == 0
    assert not return_debug_mask
    heads = query.shape[1]
    out = torch.empty_like(query)
    lse = query.new_empty(heads, len(query), dtype=widened(query).dtype)
    for q, k in sequences(query_ends, key_ends):
        sides = {"left": window_size_left, "right": window_size_right}
        scores = _scores(query[q], key[k], is_causal=is_causal, scale=scale, **sides)
        values = widened(value[k]).repeat_interleave(heads // value.shape[1], dim=1)
        out[q] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(out.dtype)
        lse[:, q] = scores.logsumexp(-1)
    return out, lse, torch.empty(2), torch.empty(0), torch.empty(0)


def flash_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float,
    window_size_left: int,
    window_size_right: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """aten's `_flash_attention_backward`, from the output and log-sum-exp that it is given."""
    assert grad.is_contiguous()
    dq, dk, dv = (torch.zeros_like(widened(x)) for x in (query, key, value))
    heads = query.shape[1] // key.shape[1]
    grad, out = widened(grad), widened(out)
    for q, k in sequences(query_ends, key_ends):
        sides = {"left": window_size_left, "right": window_size_right}
        scores = _scores(query[q], key[k], is_causal=is_causal, scale=scale, **sides)
        p = (scores - lse[:, q, None]).exp()
        keys, values = (widened(x[k]).repeat_interleave(heads, dim=1) for x in (key, value))
        d_p = torch.einsum("qhd,khd->hqk", grad[q], values)
        products = (grad[q] * out[q]).sum(-1).t()[..., None]
        d_scores = p * (d_p - products) * scale
        dq[q] = torch.einsum("hqk,khd->qhd", d_scores, keys)
        d_keys = torch.einsum("hqk,qhd->khd", d_scores, widened(query[q]))
        dk[k] += d_keys.unflatten(1, (-1, heads)).sum(2)
        d_values = torch.einsum("hqk,qhd->khd", p, grad[q])
        dv[k] += d_values.unflatten(1, (-1, heads)).sum(2)
    return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype)


def band(num_queries: int, num_keys: int, before: int) -> Tensor:
    """The keys that the last queries of a sequence see; `before` below 0 = all earlier ones."""
    distance = torch.arange(num_queries)[:, None] + num_keys - num_queries - torch.arange(num_keys)
    return (distance >= 0) & ((distance <= before) | (before < 0))


def sequences(query_ends: Tensor, key_ends: Tensor) -> list[tuple[slice, slice]]:
    """Queries and keys of each sequence."""
    pairs = zip(query_ends.tolist(), key_ends.tolist(), strict=True)
    return [
        (slice(q, q_end), slice(k, k_end)) for (q, k), (q_end, k_end) in itertools.pairwise(pairs)
    ]


def widened(x: Tensor) -> Tensor:
    """In fp32 at least."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _scores(
    query: Tensor, key: Tensor, *, is_causal: bool, scale: float, left: int, right: int
) -> Tensor:
    assert right == 0
    assert is_causal == (left < 0)
    key = widened(key).repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", widened(query), key) * scale
    return scores.masked_fill(~band(len(query), len(key), left), -torch.inf)
