"""Attention over packed rows: Transformer Engine's varlen kernels, or per-sample SDPA.

A packed row holds many samples one behind the other. `cu_seqlens` says where each begins; a token
attends to its own sample alone. Megatron's local spec refuses packed rows, so `PackedSDPA` takes
the place of its core attention there. With context parallelism each rank holds two chunks of every
sample (see `cp_slices`): its queries stay, keys and values of the whole row are gathered.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megapack.cp_slices import assembly_order
from megapack.errors import ConfigError, ScheduleError

# Rotary tables are cached by length, 32 entries at most: few distinct lengths keep them alive.
_MIN_SEQLEN_BUCKET = 64
# Megatron's mixers that are no attention.
_RECURRENT = ("MambaMixer", "GatedDeltaNet")


def seqlen_bucket(max_seqlen: int, row_tokens: int) -> int:
    """Round a row's longest sample up to one of few sizes, never exactly the row's length.

    Megatron-Core reads a rotary table that is as long as the row as one table for the whole
    row and shifts every sample's positions by its offset, hence a bucket that equals the row's
    length is stepped over.
    """
    bucket = _MIN_SEQLEN_BUCKET
    while bucket < max_seqlen or bucket == row_tokens:
        # Steps of 1.5 and 1.33: at most a third of a table is unused.
        bucket = bucket * 3 // 2 if bucket & (bucket - 1) == 0 else bucket * 4 // 3
    return bucket


def packed_seq_params(cu_seqlens_S1: Tensor, max_seqlen: int, row_tokens: int) -> PackedSeqParams:
    """Megatron's description of a packed row, with the fields that the installed version has.

    Real and padded `cu_seqlens` are the same array: alignment padding attends inside its own
    sample and carries no weight, which avoids Transformer Engine's padding between samples.

    Args:
        cu_seqlens_S1: int32, begins with 0 and ends with `row_tokens`; padding counts.
        max_seqlen: tokens of the longest sample, padding counts.
        row_tokens: the row's length before context parallel slicing.
    """
    bucket = seqlen_bucket(max_seqlen, row_tokens)
    values = {
        "qkv_format": "thd",
        "cu_seqlens_q": cu_seqlens_S1,
        "cu_seqlens_kv": cu_seqlens_S1,
        "cu_seqlens_q_padded": cu_seqlens_S1,
        "cu_seqlens_kv_padded": cu_seqlens_S1,
        "max_seqlen_q": bucket,
        "max_seqlen_kv": bucket,
        # Newer versions pass it on to Transformer Engine, which would else compare the arrays.
        "pad_between_seqs": False,
    }
    names = {field.name for field in dataclasses.fields(PackedSeqParams)}
    return PackedSeqParams(**{k: v for k, v in values.items() if k in names})


class PackedSDPA(MegatronModule):  # type: ignore[misc]
    """Core attention for Megatron's local spec: causal SDPA within each sample of a packed row.

    Takes the place of `DotProductAttention` in `SelfAttentionSubmodules.core_attention`. Refuses
    rows that are not packed: attention across samples never happens in silence.

    Context parallelism is Megatron's `cp_comm_type="all_gather"`: the forward gathers keys and
    values over the context-parallel ranks, the backward sums and scatters their gradients.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        _refuse_unsupported(config, attn_mask_type, attention_type)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.cp_group = None
        if config.context_parallel_size > 1:
            self.cp_group = (
                parallel_state.get_context_parallel_group()
                if pg_collection is None
                else pg_collection.cp
            )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """query [T, heads, d]; key and value [T, groups, d] -> [T, heads * d].

        T counts this rank's tokens; the row is T * cp tokens long.
        """
        if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
            raise ScheduleError(
                "PackedSDPA got a row without packed_seq_params (qkv_format='thd'); pass them to "
                "every pipeline and VPP chunk, or samples would attend to each other"
            )
        lengths = _sample_lengths(packed_seq_params)
        cp, cp_rank = 1, 0
        if self.cp_group is not None:
            cp, cp_rank = self.cp_group.size(), self.cp_group.rank()
            order_T = _assembly_order(packed_seq_params, cp, query.device)
            key, value = _whole_row(key, value, order_T, self.cp_group)
        out = packed_causal_attention(
            query,
            key,
            value,
            lengths,
            self.softmax_scale,
            self.dropout if self.training else 0.0,
            cp=cp,
            cp_rank=cp_rank,
        )
        return out.flatten(1)


def packed_causal_attention(
    query_QHD: Tensor,
    key_TGD: Tensor,
    value_TGD: Tensor,
    lengths: list[int],
    scale: float,
    dropout: float = 0.0,
    *,
    cp: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """Causal attention inside each sample of a packed row.

    Args:
        query_QHD: the row, samples one behind the other; with cp > 1 the rank's slice of it
            (`cp_slices.slice_positions`), Q = T / cp.
        key_TGD, value_TGD: the whole row.
        lengths: tokens of each sample; they sum to T. Neighbours of equal length (the short dummy
            samples of a uniform row's tail) run as one batch.
        scale: softmax scale.
        cp, cp_rank: context-parallel ranks, and which of them.

    Returns:
        [Q, H, D].
    """
    outputs, start = [], 0
    for length, count in _runs(lengths):
        rows = slice(start, start + length * count)
        mine = slice(rows.start // cp, rows.stop // cp)
        q = query_QHD[mine].unflatten(0, (count, length // cp)).transpose(1, 2)
        k, v = (x[rows].unflatten(0, (count, length)).transpose(1, 2) for x in (key_TGD, value_TGD))
        ends = _chunk_ends(length, cp, cp_rank)
        out = torch.cat(
            [
                _causal_to_the_end(q_chunk, k[:, :, :end], v[:, :, :end], scale, dropout)
                for q_chunk, end in zip(q.chunk(len(ends), 2), ends, strict=True)
            ],
            dim=2,
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
        start = rows.stop
    return torch.cat(outputs)


def _chunk_ends(length: int, cp: int, cp_rank: int) -> list[int]:
    """Where in a sample each chunk of a rank's queries ends, and with it the keys that it sees."""
    if cp == 1:
        return [length]
    chunk = length // (2 * cp)
    return [(cp_rank + 1) * chunk, (2 * cp - cp_rank) * chunk]


def _causal_to_the_end(q: Tensor, k: Tensor, v: Tensor, scale: float, dropout: float) -> Tensor:
    """Causal attention of queries that are a sample's last ones; [count, heads, tokens, d]."""
    num_queries, num_keys = q.shape[2], k.shape[2]
    mask = None
    if num_queries < num_keys:
        # `is_causal` would let the first query see the first key alone. A mask is L^2 / (2 * cp)
        # bytes at most for a sample of L tokens: 256 MiB for 32768 at cp=2.
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device)
        mask = mask.tril(num_keys - num_queries)
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _whole_row(key: Tensor, value: Tensor, order_T: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """Keys and values of the whole row, from every rank's slice."""
    both = torch.cat([key, value], dim=-1)
    # Megatron's gather for sequence parallelism: its backward reduces and scatters over the group.
    gathered = gather_from_sequence_parallel_region(both, group=group)
    key, value = gathered.index_select(0, order_T).split([key.shape[-1], value.shape[-1]], dim=-1)
    return key, value


def _runs(lengths: list[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for length in lengths:
        if runs and runs[-1][0] == length:
            runs[-1] = (length, runs[-1][1] + 1)
        elif length > 0:
            runs.append((length, 1))
    return runs


def _sample_lengths(params: PackedSeqParams) -> list[int]:
    """Each layer asks for the same host list: one device read per row, not one per layer."""
    lengths: list[int] | None = getattr(params, "_megapack_lengths", None)
    if lengths is None:
        lengths = torch.diff(params.cu_seqlens_q).tolist()
        params._megapack_lengths = lengths
    return lengths


def _assembly_order(params: PackedSeqParams, cp: int, device: torch.device) -> Tensor:
    order_T: Tensor | None = getattr(params, "_megapack_assembly_order", None)
    if order_T is None:
        order_T = assembly_order(_sample_lengths(params), cp).to(device)
        params._megapack_assembly_order = order_T
    return order_T


def _refuse_unsupported(config: Any, mask: AttnMaskType, attention_type: str) -> None:
    if attention_type != "self":
        raise ConfigError(f"PackedSDPA does self attention only, not {attention_type!r}")
    if mask not in (AttnMaskType.causal, AttnMaskType.padding_causal):
        raise ConfigError(f"PackedSDPA is causal; the spec asks for attn_mask_type={mask}")
    # The config's and not this layer's, so that all pipeline stages refuse alike.
    comm = getattr(config, "cp_comm_type", None)
    if config.context_parallel_size > 1 and set(_as_list(comm)) - {None, "all_gather"}:
        raise ConfigError(
            f"cp_comm_type={comm!r}: PackedSDPA gathers keys and values; set 'all_gather' or None, "
            "or use the Transformer Engine spec"
        )
    if getattr(config, "window_size", None) is not None:
        raise ConfigError("PackedSDPA has no sliding window; set window_size=None")
    if getattr(config, "softmax_type", "vanilla") != "vanilla":
        raise ConfigError(f"PackedSDPA has no softmax_type={config.softmax_type!r}; use 'vanilla'")


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def refuse_unpacked_attention(model: Any) -> None:
    """Raise unless every core attention of a model chunk keeps packed samples apart.

    Raises:
        ScheduleError: naming the module that would let samples attend to each other.
    """
    for name, module in model.named_modules():
        if type(module).__name__.startswith(_RECURRENT):
            raise ScheduleError(
                f"{name} is {type(module).__name__}, which carries state from one packed sample "
                "into the next; use attention layers only"
            )
        if name.rsplit(".", 1)[-1] != "core_attention" or isinstance(module, PackedSDPA):
            continue
        if type(module).__name__ != "TEDotProductAttention":
            raise ScheduleError(
                f"{name} is {type(module).__name__}, which has no packed (THD) attention; build "
                "the model with megapack.model.local_layer_spec or the Transformer Engine spec"
            )
