"""Shared prefixes with Transformer Engine's attention: keys are gathered before it.

Its attention returns no log-sum-exp, so calls cannot be merged. It takes sequences with more keys
than queries (see `paths`) if the mask is aligned with the last key, and no context parallelism with
that mask.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megapack.model.attention.packed import (
    gather_rows,
    once_per_row,
    sample_lengths,
    seqlen_bucket,
    shared_branches,
)
from megapack.model.attention.paths import cumulative, key_paths
from megapack.model.head import unwrapped

# Attribute of a layer that has the hook.
_MARK = "_gathers_keys"


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


def gather_te_keys(chunks: Sequence[Any]) -> None:
    """Let Transformer Engine's attention gather keys for rows whose samples share prefixes.

    After `rotary.gather_rotary_tables`, whose hooks on the same layers come first. Other rows are
    passed on as they are. Idempotent.
    """
    for chunk in map(unwrapped, chunks):
        for core in te_attentions(chunk):
            if not hasattr(core, _MARK):
                setattr(core, _MARK, True)
                core.register_forward_pre_hook(_gather_keys, with_kwargs=True)


def _gather_keys(
    core: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    row = kwargs.get("packed_seq_params")
    if row is None or not shared_branches(row):
        return None
    query, key, value, *others = args
    params, order_K = once_per_row(
        row, "gathered params", lambda: gathered_params(row, query.device)
    )
    key, value = gather_rows(key, value, order_K, None)
    changed = {"packed_seq_params": params, "attn_mask_type": _BOTTOM_RIGHT}
    return (query, key, value, *others), {**kwargs, **changed}


def gathered_params(row: PackedSeqParams, device: torch.device) -> tuple[PackedSeqParams, Tensor]:
    """The row's description with the gathered keys, and their order."""
    paths = key_paths(sample_lengths(row), shared_branches(row))
    ends = cumulative(paths.num_keys, device)
    changed = {
        "cu_seqlens_kv": ends,
        # Lengths are rounded: cuDNN builds a graph for each.
        "max_seqlen_q": seqlen_bucket(max(paths.num_queries), 0),
        "max_seqlen_kv": seqlen_bucket(max(paths.num_keys), 0),
    }
    if row.cu_seqlens_kv_padded is not None:
        changed["cu_seqlens_kv_padded"] = ends
    return dataclasses.replace(row, **changed), paths.order_K.to(device)
