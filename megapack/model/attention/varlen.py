"""torch's varlen attention over packed rows: one flash kernel for all samples of a row.

`torch.nn.attention.varlen` exists since torch 2.10. It needs CUDA, bf16 or fp16, and heads of at
most 256 channels. Its arguments differ between versions, see `varlen_options`.

Shape suffixes: Q queries, K keys, H heads, G groups of key and value heads, D channels, S1
sequences plus one.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megapack.errors import ConfigError
from megapack.model.attention.packed import PackedAttention, gather_rows
from megapack.model.attention.row import RowView

# Flash attention's kernels are compiled for head widths that are multiples of 8, up to 256.
MAX_HEAD_WIDTH = 256
HEAD_WIDTH_UNIT = 8


class PackedVarlen(PackedAttention):
    """`PackedAttention` with torch's varlen kernel.

    The kernel aligns the last query of a sequence with its last key. So with context parallelism
    each part of a rank's queries is passed as a separate sequence, with the keys up to the part's
    end. Where samples share prefixes or are in pieces, a branch's keys begin with those of what it
    continues (see `paths`).

    Raises:
        ConfigError: the config has dropout, or a head width that the kernel does not support.
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kw: Any) -> Tensor:
        """As `PackedAttention.forward`."""
        if query.dtype not in (torch.bfloat16, torch.float16):
            raise ConfigError(
                f"torch's varlen attention takes bf16 and fp16, not {query.dtype}; set "
                "model.attention=sdpa, or model.dtype=bf16"
            )
        return super().forward(query, key, value, *args, **kw)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, row: RowView) -> Tensor:
        """query [T, heads, d]; key [T, groups, d]; value [T, groups, v] -> [T, heads, v]."""
        ends = (row.cu_seqlens_S1, row.cu_seqlens_S1, row.max_seqlen, row.max_seqlen)
        if row.cp > 1 or row.branches:
            paths = row.paths
            ends = (paths.query_ends, paths.key_ends, max(paths.num_queries), max(paths.num_keys))
            key, value = gather_rows(key, value, paths.order_K, row.cp_group)
        width = value.shape[-1]
        if width < key.shape[-1]:
            # The kernel takes one width. Further channels of zeros are zeros in the result.
            value = torch.nn.functional.pad(value, (0, key.shape[-1] - width))
        out = varlen_causal_attention(query, key, value, *ends, self.softmax_scale)
        return out[..., :width]

    def _refuse_unsupported(self, config: Any, mask: AttnMaskType, attention_type: str) -> None:
        super()._refuse_unsupported(config, mask, attention_type)
        width = self.head_width
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


def varlen_causal_attention(
    query_QHD: Tensor,
    key_KGD: Tensor,
    value_KGD: Tensor,
    query_ends_S1: Tensor,
    key_ends_S1: Tensor,
    max_queries: int,
    max_keys: int,
    scale: float,
) -> Tensor:
    """Causal attention in each sequence, whose queries are at its last keys.

    Args:
        query_QHD: queries of all sequences, one after the other.
        key_KGD: keys of all sequences; H is a multiple of G.
        value_KGD: values of all sequences.
        query_ends_S1, key_ends_S1: as those of `Paths`.
        max_queries, max_keys: at least those of the longest sequence.
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
    # torch 2.15 would take cuDNN for causal rows, which builds a graph for each shape of a row (in
    # 42 ms, torch's pull request 191576) and never drops one. Earlier versions have flash only.
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out: Tensor = kernel(
            query_QHD,
            key_KGD,
            value_KGD,
            query_ends_S1,
            key_ends_S1,
            max_queries,
            max_keys,
            **varlen_options(known, scale=scale, gqa=heads != groups),
        )
    return out


def varlen_options(known: Mapping[str, Any], *, scale: float, gqa: bool) -> dict[str, Any]:
    """Arguments that make the kernel causal and scaled, for the installed version of torch.

    torch 2.10 has `is_causal` and no scale, 2.11 has `window_size` and `scale` instead, 2.12 also
    has `enable_gqa`.

    Args:
        known: names of the kernel's parameters.
    """
    options = {"window_size": (-1, 0), "scale": scale, "enable_gqa": gqa}
    if "window_size" not in known:
        options["is_causal"] = True
    return {name: value for name, value in options.items() if name in known}


@functools.cache
def _parameters(kernel: Callable[..., Any]) -> Mapping[str, Any]:
    """Cached, because each layer needs it for each row."""
    return inspect.signature(kernel).parameters


def varlen_kernel() -> Callable[..., Any]:
    """torch's `varlen_attn`."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn
