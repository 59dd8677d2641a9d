"""Rows with shared prefixes, pieces, windows, sinks or several ranks in layers with Transformer
Engine's attention.

Rows that it does not run (`te_backend.te_runs`) run in one of our kernels, which is called in its
place with its scale and its sinks. The layer stays as it is: its weights, and other rows.

Prefixes, and earlier pieces of a sample: its attention takes sequences with more keys than queries
(see `paths`) if the mask is aligned with the last key. So keys are gathered before it.

Several DP ranks: Megatron's wrapper takes the ranks that share a row from the row's description. It
keeps them until another row names its own, so from the first such row on each row names them.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megapack.model.attention.choice import packed_kernel
from megapack.model.attention.packed import (
    PackedAttention,
    gather_rows,
    layer_window,
    seqlen_bucket,
)
from megapack.model.attention.paths import Paths
from megapack.model.attention.row import RowView, row_view
from megapack.model.attention.sdpa import PackedSDPA
from megapack.model.attention.te_backend import AttentionSizes, te_runs
from megapack.model.attention.varlen import PackedVarlen
from megapack.model.carried import with_earlier_keys
from megapack.model.head import unwrapped

# Attribute of a layer whose `forward` is replaced.
_MARK = "_is_hooked"
# Attribute of a layer that has run a row of other ranks than its own.
_SWITCHED = "_follows_rows"
# Attribute of a layer with our attention in its place, once a row has needed it.
_OURS = "_packed_attention"


# Megatron's AttnMaskType lacks this one; its wrapper passes on the name alone.
_BOTTOM_RIGHT = types.SimpleNamespace(name="padding_causal_bottom_right")


def te_attentions(chunk: Any) -> Iterator[Any]:
    """The layers of a chunk that run Transformer Engine's attention."""
    for module in chunk.modules():
        if type(module).__name__ == "TEDotProductAttention":
            yield module


def hook_te_attention(chunks: Sequence[Any]) -> None:
    """Let layers with Transformer Engine's attention run all kinds of rows.

    It replaces their `forward`. Rows of samples alone on the layer's own ranks are passed on as
    they are. Idempotent.
    """
    for chunk in map(unwrapped, chunks):
        for core in te_attentions(chunk):
            if not hasattr(core, _MARK):
                setattr(core, _MARK, True)
                core.forward = functools.partial(_attend, core, core.forward)


def _attend(
    core: Any,
    te_attention: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    packed_seq_params: PackedSeqParams | None = None,
    **kwargs: Any,
) -> Tensor:
    """The layer's `forward`: `te_attention` on the row's description as it needs it, or ours."""
    params = packed_seq_params
    if params is None:
        return te_attention(query, key, value, *args, **kwargs)
    is_cut = core.config.context_parallel_size > 1
    row = row_view(params, parallel_state.get_context_parallel_group() if is_cut else None)
    window = layer_window(core.config, core.layer_number)
    sizes = AttentionSizes(
        heads=query.shape[-2],
        groups=key.shape[-2],
        head_width=query.shape[-1],
        value_width=value.shape[-1],
        cp=row.cp,
        cp_comm_type=getattr(core, "cp_comm_type", None) or "p2p",
        windows=(window,),
        softmax_type=getattr(core.config, "softmax_type", "vanilla"),
    )
    # A row that no plan has made is Transformer Engine's: it may have padding between samples.
    is_known = row.lengths is not None
    if is_known and not te_runs(sizes, more_keys=bool(row.branches), dtype=query.dtype):
        ours = _ours(core, sizes, query.dtype)
        return ours.forward(query, key, value, packed_seq_params=params)
    if row.branches:
        key, value = with_earlier_keys(row, core, key, value)
        paths = row.paths()
        key, value = gather_rows(key, value, paths.order_K, None)
        if row.gathered is None:
            row.gathered = gathered_params(params, paths)
        params = row.gathered
        kwargs["attn_mask_type"] = _BOTTOM_RIGHT
    ranks = _ranks(core, row)
    if ranks:
        params = dataclasses.replace(params, **ranks)
    return te_attention(query, key, value, *args, packed_seq_params=params, **kwargs)


def _ours(core: Any, sizes: AttentionSizes, dtype: torch.dtype) -> PackedAttention:
    """Our attention in place of a layer's, with the layer's scale and sinks."""
    # Not an attribute that torch would list as a part of the layer, with parameters.
    ours: PackedAttention | None = vars(core).get(_OURS)
    if ours is None:
        kernel = packed_kernel("fp32" if dtype == torch.float32 else "bf16", sizes)
        kind = PackedVarlen if kernel == "varlen" and not core.attention_dropout else PackedSDPA
        (window,) = sizes.windows
        config = copy.copy(core.config)
        # Ours gathers keys, however the layer exchanges them.
        config.cp_comm_type = None
        config.window_size = None if window is None else (window - 1, 0)
        config.window_attn_skip_freq = None
        ours = vars(core)[_OURS] = kind(
            config,
            core.layer_number,
            AttnMaskType.padding_causal,
            "self",
            attention_dropout=core.attention_dropout,
            softmax_scale=core.fused_attention.softmax_scale,
            k_channels=sizes.head_width,
        )
    ours.training = core.training
    ours.softmax_offset = core.softmax_offset
    return ours


def _ranks(core: Any, row: RowView) -> dict[str, Any]:
    """The fields of a row's description that name the ranks which share it; none if the layer
    knows them."""
    group = row.cp_group
    if group is None:
        return {}
    if group.size() == core.config.context_parallel_size and not hasattr(core, _SWITCHED):
        return {}
    setattr(core, _SWITCHED, True)
    if group.size() == 1:
        return {"local_cp_size": 1}
    wrapper = type(core)
    # Megatron makes the stream of the exchanges if the config has context parallelism.
    if getattr(wrapper, "cp_stream", None) is None:
        wrapper.cp_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    return {"cp_group": group}


def gathered_params(params: PackedSeqParams, paths: Paths) -> PackedSeqParams:
    """The row's description with the gathered keys."""
    changed = {
        "cu_seqlens_kv": paths.key_ends,
        # Lengths are rounded: cuDNN builds a graph for each.
        "max_seqlen_q": seqlen_bucket(max(paths.num_queries), 0),
        "max_seqlen_kv": seqlen_bucket(max(paths.num_keys), 0),
    }
    if params.cu_seqlens_kv_padded is not None:
        changed["cu_seqlens_kv_padded"] = paths.key_ends
    return dataclasses.replace(params, **changed)
