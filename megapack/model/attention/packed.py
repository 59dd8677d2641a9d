"""Attention over packed rows: Megatron's description of a row, and the base class of our kernels.

A packed row holds many samples one after the other. `cu_seqlens` says where each begins; a token
attends to its own sample only. Transformer Engine's spec supports that. Megatron's local spec
refuses packed rows, so a `PackedAttention` replaces its core attention: `varlen.PackedVarlen` with
torch's varlen kernel or `sdpa.PackedSDPA` with one call per run of samples of equal length. With
context parallelism each rank holds two parts of every sample (see `rows.slices`): it keeps its
queries and gathers the keys and values of the whole row.

Shape suffixes: S1 samples plus one, K keys.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from megapack.errors import ConfigError
from megapack.model.attention.mixers import refuse_unpacked_mixers, sample_indices
from megapack.model.attention.row import RowView, layer_row, with_view
from megapack.model.carried import with_earlier_keys
from megapack.model.sharded import Sharded
from megapack.model.vision.features import RowImages
from megapack.prefixes import sequences
from megapack.rows.chain import Link
from megapack.rows.packed import PackedRow

# Smallest length of a rotary table. Megatron caches tables by length, at most 32, so lengths are
# rounded up to few sizes: 64, 96, 128, 192, ... are 23 sizes up to 131072. Chosen by hand.
_MIN_SEQLEN_BUCKET = 64


def seqlen_bucket(max_seqlen: int, row_tokens: int) -> int:
    """Round a row's longest sample up to one of few sizes, but never to the row's length.

    If the rotary table is as long as the row, Megatron-Core uses it as one table for the whole row
    and shifts every sample's positions by its offset. So a size that equals the row's length is
    skipped.
    """
    bucket = _MIN_SEQLEN_BUCKET
    while bucket < max_seqlen or bucket == row_tokens:
        # Steps of 1.5 and 1.33 (64, 96, 128, 192): at most a third of a table is unused.
        bucket = bucket * 3 // 2 if bucket & (bucket - 1) == 0 else bucket * 4 // 3
    return bucket


def packed_seq_params(
    cu_seqlens_S1: Tensor, max_seqlen: int, row_tokens: int, *, cp: int = 1
) -> PackedSeqParams:
    """Megatron's description of a packed row, with the fields of the installed version.

    Real and padded `cu_seqlens` are the same array: alignment padding attends inside its own sample
    and has no loss weight, so Transformer Engine need not handle padding between samples.

    Args:
        cu_seqlens_S1: int32, from 0 to `row_tokens`, with padding.
        max_seqlen: tokens of the longest sample, with padding.
        row_tokens: the row's length before it is sliced for context parallelism.
        cp: number of ranks that share the row.
    """
    bucket = seqlen_bucket(max_seqlen, row_tokens)
    values: dict[str, Any] = {
        "qkv_format": "thd",
        **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), cu_seqlens_S1),
        **dict.fromkeys(("cu_seqlens_q_padded", "cu_seqlens_kv_padded"), cu_seqlens_S1),
        **dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), bucket),
        "pad_between_seqs": False,
    }
    names = {field.name for field in dataclasses.fields(PackedSeqParams)}
    if cp == 1 and "pad_between_seqs" not in names:
        # Given both arrays, Transformer Engine compares them and waits for the device, twice per
        # layer. Without padded arrays it uses the real ones. With cp > 1 it needs the padded ones.
        names -= {"cu_seqlens_q_padded", "cu_seqlens_kv_padded"}
    if "seq_idx" in names:
        # Megatron's MambaMixer sees the whole row, its ranks' slices put together.
        values["seq_idx"] = sample_indices(cu_seqlens_S1, row_tokens)
    return PackedSeqParams(**{k: v for k, v in values.items() if k in names})


def row_params(
    row: PackedRow, cp_group: Any = None, link: Link | None = None, images: RowImages | None = None
) -> PackedSeqParams:
    """Megatron's description of a row, which all model chunks get, with the row's view.

    Args:
        row: on its device.
        cp_group, link, images: see `RowView`.
    """
    ends = row.cu_seqlens_S1
    branches = tuple(sequences(row.branches))
    is_plain = row.piece is None and all(sequence.parent < 0 for sequence in branches)
    params = packed_seq_params(ends, row.max_seqlen, row.row_tokens, cp=row.num_slices)
    view = RowView(
        ends,
        params.max_seqlen_q,
        lengths=row.padded_lengths,
        positions_T=row.position_ids_T,
        branch_of_T=row.branch_of_T,
        branch_samples=[max(row.lengths[k] for k in branch.samples) for branch in row.branches],
        branches=() if is_plain else branches,
        cp_group=cp_group,
        link=link,
        images=images,
        copies=tuple(len(branch.samples) for branch in row.branches),
    )
    return with_view(params, view)


class PackedAttention(Sharded, MegatronModule):  # type: ignore[misc]
    """Core attention for Megatron's local spec: causal within each sample of a packed row.

    Replaces `DotProductAttention` in `SelfAttentionSubmodules.core_attention`. Rows that are not
    packed are refused, because their samples would attend to each other. A kernel is a subclass
    that implements `attend`.

    Args:
        k_channels: width of a head's queries and keys; None = config.kv_channels. Megatron gives it
            and `v_channels` to multi-latent attention; the width of values is seen in their shape.

    Sliding windows and sinks are Megatron's `window_size`, `window_attn_skip_freq` and
    `softmax_type`: a sink is one more logit in the softmax of each head, whose value is 0. Learned
    ones are the parameter `softmax_offset`, as in Megatron's own attention.

    Context parallelism is Megatron's `cp_comm_type="all_gather"`: the forward gathers keys and
    values over the context-parallel ranks, the backward sums and scatters their gradients.

    Raises:
        ConfigError: the config has a setting that packed kernels do not support.
    """

    splits: ClassVar = {"softmax_offset": 0}

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
        k_channels: int | None = None,
        v_channels: int | None = None,
    ) -> None:
        super().__init__(config=config)
        self.head_width = k_channels or config.kv_channels
        self._refuse_unsupported(config, attn_mask_type, attention_type)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(self.head_width)
        self.window = layer_window(config, layer_number)
        self._make_sinks(config)
        self.tp_group = getattr(pg_collection, "tp", None)
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
        **_: Any,
    ) -> Tensor:
        """query [T, heads, d]; key [T, groups, d]; value [T, groups, v] -> [T, heads * v].

        T is the number of this rank's tokens; the row has T * cp tokens. Values are as wide as keys
        but in multi-latent attention.
        """
        row = layer_row(self, packed_seq_params, self.cp_group)
        key, value = with_earlier_keys(row, self, key, value)
        return self.attend(query, key, value, row).flatten(1)

    def _make_sinks(self, config: Any) -> None:
        """`softmax_offset`: a logit of each of this rank's heads, or None."""
        kind = getattr(config, "softmax_type", "vanilla")
        if kind == "vanilla":
            self.softmax_offset = None
            return
        tp = config.tensor_model_parallel_size
        zeros = torch.zeros(
            config.num_attention_heads // tp,
            dtype=config.params_dtype,
            device="cpu" if config.use_cpu_initialization else torch.cuda.current_device(),
        )
        if kind == "off-by-one":
            self.register_buffer("softmax_offset", zeros, persistent=False)
            return
        self.softmax_offset = torch.nn.Parameter(zeros)
        set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, row: RowView) -> Tensor:
        """As `forward`, but the result is [T, heads, v], and keys and values begin with those of
        a sample's earlier pieces (`RowView.carried`)."""
        raise NotImplementedError

    def _refuse_unsupported(self, config: Any, mask: AttnMaskType, attention_type: str) -> None:
        name = type(self).__name__
        if attention_type != "self":
            raise ConfigError(f"{name} does self attention only, not {attention_type!r}")
        if mask not in (AttnMaskType.causal, AttnMaskType.padding_causal):
            raise ConfigError(f"{name} is causal; the spec asks for attn_mask_type={mask}")
        # The config's setting, not this layer's, so that all pipeline stages refuse it.
        comm = getattr(config, "cp_comm_type", None)
        if config.context_parallel_size > 1 and set(_as_list(comm)) - {None, "all_gather"}:
            raise ConfigError(
                f"cp_comm_type={comm!r}: {name} gathers keys and values; set 'all_gather' or "
                "None, or use the Transformer Engine spec"
            )
        window = getattr(config, "window_size", None)
        if window is not None and (window[0] < 0 or window[1] != 0):
            raise ConfigError(
                f"window_size={window}: {name} is causal and takes a number of earlier tokens; set "
                "(tokens before a token's own, 0)"
            )


def layer_window(config: Any, layer_number: int) -> int | None:
    """Tokens that a token of a layer sees, itself among them; None = all before it.

    Args:
        config: Megatron's; its `window_size` counts the tokens before a token's own.
        layer_number: of the whole model, from 1 on.
    """
    window = getattr(config, "window_size", None)
    frequency = getattr(config, "window_attn_skip_freq", None)
    # Transformer Engine takes (-1, 0) for no window.
    if window is None or window[0] < 0:
        return None
    if not is_layer_window_attention(window, frequency, layer_number):
        return None
    return int(window[0]) + 1


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def gather_rows(key: Tensor, value: Tensor, order_K: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """Gather keys and values of all ranks and reorder them.

    Args:
        order_K: for each key its index in the concatenated slices of all ranks. The gradients of a
            key that is there several times add up.
        group: the context-parallel ranks; None or one rank: this one has the whole row.
    """
    if group is None or group.size() == 1:
        return key.index_select(0, order_K), value.index_select(0, order_K)
    both = torch.cat([key, value], dim=-1)
    # Megatron's gather for sequence parallelism: its backward reduces and scatters over the group.
    gathered = gather_from_sequence_parallel_region(both, group=group)
    key, value = gathered.index_select(0, order_K).split([key.shape[-1], value.shape[-1]], dim=-1)
    return key, value


def refuse_unpacked_attention(model: Any) -> None:
    """Check that no layer of a model chunk mixes packed samples.

    Raises:
        ConfigError: a module would let samples attend to each other, or carry a state from one
            into the next; the message names it.
    """
    refuse_unpacked_mixers(model)
    for name, module in model.named_modules():
        if name.rsplit(".", 1)[-1] != "core_attention" or isinstance(module, PackedAttention):
            continue
        if type(module).__name__ != "TEDotProductAttention":
            raise ConfigError(
                f"{name} is {type(module).__name__}, which has no packed (THD) attention; build "
                "the model with Transformer Engine's spec, or with megapack.job.gpt's local one"
            )
