"""The gated delta rule (arXiv 2412.06464), by torch and by flash-linear-attention.

Per head, with a state S of [key channels, value channels]:

    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T
    o_t = S_t^T q_t / sqrt(K)

q and k are normalised to length 1. Kernels are `scan.ScanKernel`s; their inputs are queries and
keys [L, key heads, K], values [L, heads, V], decays g (at most 0) and beta [L, heads]. Consecutive
heads share the queries and keys of a key head. States are [N, heads, K, V], in fp32 or fp64.

Shape suffixes: L tokens, N segments, H heads, C tokens of a chunk, K and V channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megapack.model.recurrent.scan import at_least_fp32, decay_between, scan_in_chunks
from megapack.model.recurrent.segments import Level

# As in flash-linear-attention.
_NORM_EPSILON = 1e-6


def torch_delta_rule(
    inputs: Sequence[Tensor], level: Level, initial: Tensor | None
) -> tuple[Tensor, Tensor]:
    """By torch, on every device and in every precision.

    Within a chunk the tokens' updates are the solution of a triangular system (section 3.3 of the
    paper). After a segment's end beta and g are 0, which keeps the state.
    """
    query, key, value, decay, beta = inputs
    repeats = value.shape[1] // query.shape[1]
    q, k = (_normalised(x).repeat_interleave(repeats, dim=1) for x in (query, key))
    v, g, b = (at_least_fp32(x) for x in (value, decay, beta))
    q = q * q.shape[-1] ** -0.5
    if initial is None:
        initial = v.new_zeros(len(level.lengths), v.shape[1], k.shape[-1], v.shape[-1])
    out, state = scan_in_chunks(_chunk, (q, k, v, g, b), level, initial)
    return out.to(value.dtype), state


def _chunk(inputs: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """One chunk of all segments: q, k, v [N, H, C, *], decay and beta [N, H, C]."""
    q, k, v, decay, beta = inputs
    since_start = decay.cumsum(-1)
    between = decay_between(since_start)
    from_start = since_start.exp()[..., None]
    scaled = k * beta[..., None]
    mixed = (scaled @ k.mT * between).tril(-1)
    target = v * beta[..., None] - (scaled * from_start) @ state
    identity = torch.eye(mixed.shape[-1], dtype=mixed.dtype, device=mixed.device)
    update = torch.linalg.solve_triangular(identity + mixed, target, upper=False)
    out = (q * from_start) @ state + (q @ k.mT * between) @ update
    to_end = (since_start[..., -1:] - since_start).exp()[..., None]
    state = state * since_start[..., -1, None, None].exp() + (k * to_end).mT @ update
    return out, state


def _normalised(x: Tensor) -> Tensor:
    x = at_least_fp32(x)
    return x * (x.square().sum(-1, keepdim=True) + _NORM_EPSILON).rsqrt()


def fla_delta_rule(
    inputs: Sequence[Tensor], level: Level, initial: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """By flash-linear-attention, on a GPU."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    query, key, value, decay, beta = (x.unsqueeze(0) for x in inputs)
    out, ends = chunk_gated_delta_rule(
        query,
        key,
        value,
        g=decay,
        beta=beta,
        initial_state=initial,
        output_final_state=level.hands_on,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=level.ends_N1,
        # Without it the kernel waits for the device to read them.
        cu_seqlens_cpu=level.host_ends_N1,
    )
    return out.squeeze(0), ends
