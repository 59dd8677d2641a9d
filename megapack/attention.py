"""Attention over packed rows: Transformer Engine's varlen kernels, or per-sample SDPA.

A packed row holds many samples one behind the other. `cu_seqlens` says where each begins; a token
attends to its own sample alone. Megatron's local spec refuses packed rows, so `PackedSDPA` takes
the place of its core attention there.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

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
        """query [T, heads, d]; key and value [T, groups, d] -> [T, heads * d]."""
        if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
            raise ScheduleError(
                "PackedSDPA got a row without packed_seq_params (qkv_format='thd'); pass them to "
                "every pipeline and VPP chunk, or samples would attend to each other"
            )
        lengths = _sample_lengths(packed_seq_params)
        out = packed_causal_attention(
            query, key, value, lengths, self.softmax_scale, self.dropout if self.training else 0.0
        )
        return out.flatten(1)


def packed_causal_attention(
    query_THD: Tensor,
    key_TGD: Tensor,
    value_TGD: Tensor,
    lengths: list[int],
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """Causal attention inside each sample of a packed row.

    Args:
        query_THD, key_TGD, value_TGD: the row, samples one behind the other.
        lengths: tokens of each sample; they sum to T. Neighbours of equal length (the short dummy
            samples of a uniform row's tail) run as one batch.
        scale: softmax scale.

    Returns:
        [T, H, D].
    """
    outputs, start = [], 0
    for length, count in _runs(lengths):
        rows = slice(start, start + length * count)
        q, k, v = (
            x[rows].view(count, length, *x.shape[1:]).transpose(1, 2)
            for x in (query_THD, key_TGD, value_TGD)
        )
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            dropout_p=dropout,
            is_causal=True,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
        start = rows.stop
    return torch.cat(outputs)


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


def _refuse_unsupported(config: Any, mask: AttnMaskType, attention_type: str) -> None:
    if attention_type != "self":
        raise ConfigError(f"PackedSDPA does self attention only, not {attention_type!r}")
    if mask not in (AttnMaskType.causal, AttnMaskType.padding_causal):
        raise ConfigError(f"PackedSDPA is causal; the spec asks for attn_mask_type={mask}")
    if config.context_parallel_size != 1:
        raise ConfigError(
            f"packed attention on the local spec runs with cp=1, not "
            f"cp={config.context_parallel_size}; set layout.cp=1 or use the TE spec"
        )
    if getattr(config, "window_size", None) is not None:
        raise ConfigError("PackedSDPA has no sliding window; set window_size=None")
    if getattr(config, "softmax_type", "vanilla") != "vanilla":
        raise ConfigError(f"PackedSDPA has no softmax_type={config.softmax_type!r}; use 'vanilla'")


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
