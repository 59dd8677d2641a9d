"""The scan of Mamba-2 (arXiv 2405.21060), by torch and by mamba_ssm.

Per head, with a state S of [channels, state channels] and A below 0:

    S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T
    y_t = S_t C_t

Kernels are `scan.ScanKernel`s once they have A; their inputs are x [L, heads, P], dt [L, heads],
B and C [L, groups, S]. Consecutive heads share the B and C of a group. States are [N, heads, P, S],
in fp32 or fp64.

Shape suffixes: L tokens, N segments, H heads, C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megapack.model.recurrent.scan import at_least_fp32, decay_between, scan_in_chunks
from megapack.model.recurrent.segments import Level

# Megatron's default.
_MAMBA_CHUNK_TOKENS = 128


def torch_state_space(
    inputs: Sequence[Tensor], level: Level, initial: Tensor | None, *, A_H: Tensor
) -> tuple[Tensor, Tensor]:
    """By torch, on every device and in every precision.

    After a segment's end dt is 0, which keeps the state.
    """
    x, dt, B, C = inputs
    repeats = x.shape[1] // B.shape[1]
    scaled = at_least_fp32(x) * dt[..., None]
    Bs, Cs = (at_least_fp32(y).repeat_interleave(repeats, dim=1) for y in (B, C))
    if initial is None:
        initial = scaled.new_zeros(len(level.lengths), *scaled.shape[1:], Bs.shape[-1])
    out, state = scan_in_chunks(_chunk, (scaled, dt * A_H, Bs, Cs), level, initial)
    return out.to(x.dtype), state


def _chunk(inputs: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """One chunk of all segments: x, B, C [N, H, C, *], decay [N, H, C]."""
    x, decay, B, C = inputs
    since_start = decay.cumsum(-1)
    inside = (C @ B.mT * decay_between(since_start)) @ x
    out = inside + (C * since_start.exp()[..., None]) @ state.mT
    to_end = (since_start[..., -1:] - since_start).exp()[..., None]
    state = state * since_start[..., -1, None, None].exp() + (x * to_end).mT @ B
    return out, state


def mamba_state_space(
    inputs: Sequence[Tensor], level: Level, initial: Tensor | None, *, A_H: Tensor
) -> tuple[Tensor, Tensor | None]:
    """By mamba_ssm, on a GPU.

    Its kernel gives the states of a batch, not of samples in a row. So a level whose states nothing
    needs is one row with the number of each token's segment, and any other a batch of segments
    padded to the longest, with dt of 0 there.
    """
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    if initial is None and not level.hands_on:
        x, dt, B, C = (y.unsqueeze(0) for y in inputs)
        out = mamba_chunk_scan_combined(
            x, dt, A_H, B, C, _MAMBA_CHUNK_TOKENS, seq_idx=level.numbers_1L
        )
        return out.squeeze(0), None
    x, dt, B, C = (level.padded(y) for y in inputs)
    out, ends = mamba_chunk_scan_combined(
        x, dt, A_H, B, C, _MAMBA_CHUNK_TOKENS, initial_states=initial, return_final_states=True
    )
    return level.unpadded(out), ends
