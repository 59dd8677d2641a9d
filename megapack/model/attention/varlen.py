"""torch's varlen attention over packed rows: one flash kernel for all samples of a row.

`torch.nn.attention.varlen` is there from torch 2.10 on; it wants CUDA, bf16 or fp16, and heads of
at most 256 channels. Its arguments differ between versions, see `varlen_options`.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megapack.errors import ConfigError
from megapack.model.attention.packed import (
    PackedAttention,
    chunk_ends,
    gather_rows,
    once_per_row,
    sample_lengths,
)
from megapack.rows.slices import assembly_order

# What flash attention's kernels are compiled for.
MAX_HEAD_WIDTH = 256
HEAD_WIDTH_UNIT = 8


class PackedVarlen(PackedAttention):
    """`PackedAttention` with torch's varlen kernel.

    A causal query that stands at the end of its keys sees all of them, so with context parallelism
    each chunk of a rank's queries is a sequence of its own, with the keys up to the chunk's end.

    Raises:
        ConfigError: dropout, or heads that the kernel has no code for.
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kw: Any) -> Tensor:
        """As `PackedAttention.forward`."""
        if query.dtype not in (torch.bfloat16, torch.float16):
            raise ConfigError(
                f"torch's varlen attention takes bf16 and fp16, not {query.dtype}; set "
                "model.attention=sdpa, or model.dtype=bf16"
            )
        return super().forward(query, key, value, *args, **kw)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, params: PackedSeqParams) -> Tensor:
        """query [T, heads, d]; key and value [T, groups, d] -> [T, heads, d]."""
        spans = _spans(params, *self.cp, device=query.device)
        if spans.order_K is not None:
            key, value = gather_rows(key, value, spans.order_K, self.cp_group)
        return varlen_causal_attention(query, key, value, spans, self.softmax_scale)

    def _refuse_unsupported(self, config: Any, mask: AttnMaskType, attention_type: str) -> None:
        super()._refuse_unsupported(config, mask, attention_type)
        width = config.kv_channels
        if config.attention_dropout:
            raise ConfigError(
                f"attention_dropout={config.attention_dropout}: torch's varlen attention has none; "
                "set it to 0, or use PackedSDPA"
            )
        if width > MAX_HEAD_WIDTH or width % HEAD_WIDTH_UNIT:
            raise ConfigError(
                f"heads of {width} channels: torch's varlen attention takes multiples of "
                f"{HEAD_WIDTH_UNIT} up to {MAX_HEAD_WIDTH}; use PackedSDPA"
            )


@dataclass(frozen=True, kw_only=True)
class VarlenSpans:
    """The sequences that the kernel sees: a row's samples, or the chunks of a rank's slice."""

    cu_seqlens_q_S1: Tensor
    cu_seqlens_k_S1: Tensor
    max_q: int
    max_k: int
    order_K: Tensor | None = None
    """Where each key stands in the slices of all context-parallel ranks, one after the other;
    None: keys are the row's own."""


def varlen_spans(lengths: list[int], cp: int, cp_rank: int, device: torch.device) -> VarlenSpans:
    """The chunks that a context-parallel rank holds of each sample, and the keys of each.

    Args:
        lengths: padded tokens of each sample.
        cp, cp_rank: ranks, at least 2, and which of them.

    With samples of 8 and 4 tokens, cp=2 and rank 0, queries are the positions 0 1, 6 7, 8, 11:
    sequences of 2, 2, 1 and 1 queries with 2, 8, 1 and 4 keys.
    """
    starts = itertools.accumulate(lengths[:-1], initial=0)
    chunks = [n // (2 * cp) for n in lengths for _ in range(2)]
    ends = [end for n in lengths for end in chunk_ends(n, cp, cp_rank)]
    keys = [
        torch.arange(start, start + end)
        for start, n in zip(starts, lengths, strict=True)
        for end in chunk_ends(n, cp, cp_rank)
    ]
    return VarlenSpans(
        cu_seqlens_q_S1=_cumulated(chunks, device),
        cu_seqlens_k_S1=_cumulated(ends, device),
        max_q=max(chunks),
        max_k=max(ends),
        order_K=assembly_order(lengths, cp)[torch.cat(keys)].to(device),
    )


def _cumulated(counts: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *counts]).cumsum(0).to(device, torch.int32)


def _spans(params: PackedSeqParams, cp: int, cp_rank: int, *, device: torch.device) -> VarlenSpans:
    """Made once per row, for all layers; without context parallelism nothing is read from it."""
    if cp == 1:
        return VarlenSpans(
            cu_seqlens_q_S1=params.cu_seqlens_q,
            cu_seqlens_k_S1=params.cu_seqlens_kv,
            max_q=params.max_seqlen_q,
            max_k=params.max_seqlen_kv,
        )

    def make() -> VarlenSpans:
        return varlen_spans(sample_lengths(params), cp, cp_rank, device)

    return once_per_row(params, "varlen spans", make)


def varlen_causal_attention(
    query_QHD: Tensor, key_KGD: Tensor, value_KGD: Tensor, spans: VarlenSpans, scale: float
) -> Tensor:
    """Causal attention of each sequence of `spans`, whose queries are the last of its keys.

    Args:
        query_QHD: queries of all sequences, one after the other.
        key_KGD, value_KGD: their keys; heads are a multiple of groups.
        scale: softmax scale.

    Returns:
        [Q, H, D].
    """
    kernel = varlen_kernel()
    heads = query_QHD.shape[1]
    groups = key_KGD.shape[1]
    known = _parameters(kernel)
    if heads != groups and "enable_gqa" not in known:
        key_KGD = key_KGD.repeat_interleave(heads // groups, dim=1)
        value_KGD = value_KGD.repeat_interleave(heads // groups, dim=1)
    if "scale" not in known:
        query_QHD = query_QHD * (scale * math.sqrt(query_QHD.shape[-1]))
    out: Tensor = kernel(
        query_QHD,
        key_KGD,
        value_KGD,
        spans.cu_seqlens_q_S1,
        spans.cu_seqlens_k_S1,
        spans.max_q,
        spans.max_k,
        **varlen_options(known, scale=scale, gqa=heads != groups),
    )
    return out


def varlen_options(known: Mapping[str, Any], *, scale: float, gqa: bool) -> dict[str, Any]:
    """What makes the kernel causal and scaled, in the arguments that this version has.

    torch 2.10 has `is_causal` and no scale; 2.11 a window in its place, and `scale`; 2.12 also
    `enable_gqa`.
    """
    options = {"window_size": (-1, 0), "scale": scale, "enable_gqa": gqa}
    if "window_size" not in known:
        options["is_causal"] = True
    return {name: value for name, value in options.items() if name in known}


@functools.cache
def _parameters(kernel: Callable[..., Any]) -> Mapping[str, Any]:
    """Each layer of each row asks."""
    return inspect.signature(kernel).parameters


def varlen_kernel() -> Callable[..., Any]:
    """torch's `varlen_attn`."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn
