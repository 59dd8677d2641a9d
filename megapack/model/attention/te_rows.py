"""Rows with shared prefixes, pieces or several DP ranks, with Transformer Engine's attention.

Prefixes, and earlier pieces of a sample: its attention returns no log-sum-exp, so calls cannot be
merged. It takes sequences with more keys than queries (see `paths`) if the mask is aligned with the
last key, and no context parallelism with that mask. So keys are gathered before it.

Several DP ranks: Megatron's wrapper takes the ranks that share a row from the row's description. It
keeps them until another row names its own, so from the first such row on each row names them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megapack.model.attention.packed import gather_rows, layer_window, seqlen_bucket
from megapack.model.attention.paths import Paths
from megapack.model.attention.row import row_view
from megapack.model.carried import with_earlier_keys
from megapack.model.head import unwrapped

# Attribute of a layer that has the hooks.
_MARK = "_is_hooked"
# Attribute of a layer that has run a row of other ranks than its own.
_SWITCHED = "_follows_rows"


@dataclasses.dataclass(frozen=True)
class _MaskType:
    """Megatron's AttnMaskType lacks this one; its wrapper passes on the name alone."""

    name: str


_BOTTOM_RIGHT = _MaskType("padding_causal_bottom_right")


def te_attentions(chunk: Any) -> Iterator[Any]:
    """The layers of a chunk that run Transformer Engine's attention."""
    for module in chunk.modules():
        if type(module).__name__ == "TEDotProductAttention":
            yield module


def hook_te_attention(chunks: Sequence[Any]) -> None:
    """Let Transformer Engine's attention gather keys for rows whose samples share prefixes or are
    in pieces, and run rows over several DP ranks.

    After `rotary.gather_rotary_tables`, whose hooks on the same layers come first. Other rows are
    passed on as they are. Idempotent.
    """
    for chunk in map(unwrapped, chunks):
        for core in te_attentions(chunk):
            if not hasattr(core, _MARK):
                setattr(core, _MARK, True)
                core.register_forward_pre_hook(_gather_keys, with_kwargs=True)
                core.register_forward_pre_hook(_name_ranks, with_kwargs=True)


def _name_ranks(
    core: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    params = kwargs.get("packed_seq_params")
    if params is None or row_view(params).cp_group is None:
        return None
    group = row_view(params).cp_group
    if group.size() == core.config.context_parallel_size and not hasattr(core, _SWITCHED):
        return None
    setattr(core, _SWITCHED, True)
    named = {"cp_group": group} if group.size() > 1 else {"local_cp_size": 1}
    wrapper = type(core)
    # Megatron makes the stream of the exchanges if the config has context parallelism.
    if group.size() > 1 and getattr(wrapper, "cp_stream", None) is None:
        wrapper.cp_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    return args, {**kwargs, "packed_seq_params": dataclasses.replace(params, **named)}


def _gather_keys(
    core: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    params = kwargs.get("packed_seq_params")
    if params is None or not row_view(params).branches:
        return None
    row = row_view(params)
    query, key, value, *others = args
    key, value = with_earlier_keys(row, core, key, value)
    window = layer_window(core.config, core.layer_number)
    paths = row.paths(window)
    key, value = gather_rows(key, value, paths.order_K, None)
    if window not in row.gathered:
        row.gathered[window] = gathered_params(params, paths)
    changed = {"packed_seq_params": row.gathered[window], "attn_mask_type": _BOTTOM_RIGHT}
    return (query, key, value, *others), {**kwargs, **changed}


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
