"""torch's varlen attention over packed rows: one flash kernel for all samples of a row.

`torch.nn.attention.varlen` has scale and windows since torch 2.11. It needs CUDA, bf16 or fp16, and
heads of at most 256 channels.

Shape suffixes: Q queries, K keys, H heads, G groups of key and value heads, D channels, S1
sequences plus one.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megapack.errors import ConfigError
from megapack.model.attention.packed import PackedAttention, gather_rows
from megapack.model.attention.row import RowView

# Flash attention's kernels are compiled for head sizes that are multiples of 8, up to 256.
MAX_HEAD_SIZE = 256
HEAD_SIZE_UNIT = 8


class PackedVarlen(PackedAttention):
    """`PackedAttention` with torch's varlen kernel.

    The kernel aligns the last query of a sequence with its last key. So with context parallelism
    each part of a rank's queries is passed as a separate sequence, with the keys up to the part's
    end. Where samples share prefixes or are in pieces, a branch's keys begin with those of what it
    continues (see `paths`).

    Raises:
        ConfigError: the config has dropout, or a head size that the kernel does not support.
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
            paths = row.paths(self.window)
            ends = (paths.query_ends, paths.key_ends, max(paths.num_queries), max(paths.num_keys))
            key, value = gather_rows(key, value, paths.order_K, row.cp_group)
        value_size = value.shape[-1]
        if value_size < key.shape[-1]:
            # The kernel takes one head size. Further channels of zeros are zeros in the result.
            value = torch.nn.functional.pad(value, (0, key.shape[-1] - value_size))
        out = varlen_causal_attention(
            query, key, value, *ends, self.softmax_scale, self.window, self.softmax_offset
        )
        return out[..., :value_size]

    def _refuse_unsupported(self, config: Any, mask: AttnMaskType, attention_type: str) -> None:
        super()._refuse_unsupported(config, mask, attention_type)
        if config.attention_dropout:
            raise ConfigError(
                f"attention_dropout={config.attention_dropout}: torch's varlen attention has none; "
                "set it to 0, or use PackedSDPA"
            )
        if obstacle := heads_obstacle([self.head_width]):
            raise ConfigError(f"{obstacle}; use PackedSDPA")


def heads_obstacle(head_sizes: Sequence[int]) -> str | None:
    """Why the kernel does not run layers with heads of these channels; None if it does."""
    for size in head_sizes:
        if size > MAX_HEAD_SIZE or size % HEAD_SIZE_UNIT:
            return (
                f"heads of {size} channels: torch's varlen attention takes multiples of "
                f"{HEAD_SIZE_UNIT} up to {MAX_HEAD_SIZE}"
            )
    return None


def varlen_causal_attention(
    query_QHD: Tensor,
    key_KGD: Tensor,
    value_KGD: Tensor,
    query_ends_S1: Tensor,
    key_ends_S1: Tensor,
    max_queries: int,
    max_keys: int,
    scale: float,
    window: int | None = None,
    sink_H: Tensor | None = None,
) -> Tensor:
    """Causal attention in each sequence, whose queries are at its last keys.

    Args:
        query_QHD: queries of all sequences, one after the other.
        key_KGD: keys of all sequences; H is a multiple of G.
        value_KGD: values of all sequences.
        query_ends_S1, key_ends_S1: as those of `Paths`.
        max_queries, max_keys: at least those of the longest sequence.
        scale: softmax scale.
        window: keys that a query sees, its own and those before it; None = all.
        sink_H: one more logit in the softmax of each head, of value 0; None = none.

    Returns:
        [Q, H, D].
    """
    inputs = (query_QHD, key_KGD, value_KGD)
    ends = (query_ends_S1, key_ends_S1, max_queries, max_keys)
    out: Tensor
    if sink_H is not None:
        out = _WithSinks.apply(*inputs, sink_H, ends, scale, window)  # type: ignore[no-untyped-call]
        return out
    kernel = varlen_kernel()
    options: dict[str, Any] = {"window_size": (-1 if window is None else window - 1, 0)}
    if _takes_gqa(kernel):
        options["enable_gqa"] = query_QHD.shape[1] != key_KGD.shape[1]
    # torch 2.15 would take cuDNN for causal rows, which builds a graph for each shape of a row (in
    # 42 ms, torch's pull request 191576) and never drops one. Earlier versions have flash only.
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = kernel(*inputs, *ends, scale=scale, **options)
    return out


class _WithSinks(torch.autograd.Function):
    """Attention with one more logit in the softmax of each head, of value 0.

    The kernel knows no sinks. With l the log-sum-exp of a query's scores and s the sink, the whole
    softmax has L = logaddexp(l, s), and the output is exp(l - L) times the kernel's. The backward
    of flash attention (Dao et al. 2022, arXiv 2205.14135, algorithm 4) reads output and log-sum-exp
    only as those of the whole softmax, so given these it returns exact gradients. The sink's weight
    is exp(s - L), its value 0, so its gradient is -exp(s - L) <dO, O>, summed over queries.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sink_H: Tensor,
        ends: tuple[Tensor, Tensor, int, int],
        scale: float,
        window: int | None,
    ) -> Tensor:
        ctx.options = {
            "scale": scale,
            "window_size_left": -1 if window is None else window - 1,
            "window_size_right": 0,
        }
        ctx.is_causal = window is None
        forward = flash_kernels()[0]
        out, lse_HQ, ctx.rng_state, ctx.unused, _ = forward(
            query, key, value, *ends, 0.0, ctx.is_causal, False, **ctx.options
        )
        total_HQ = torch.logaddexp(lse_HQ, sink_H.to(lse_HQ.dtype)[:, None])
        out = (out * (lse_HQ - total_HQ).exp().t()[..., None]).to(out.dtype)
        ctx.save_for_backward(query, key, value, sink_H, out, total_HQ, *ends[:2])
        ctx.most = ends[2:]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sink_H, out, total_HQ, *ends = ctx.saved_tensors
        call = (*ends, *ctx.most, 0.0, ctx.is_causal, ctx.rng_state, ctx.unused)
        grads = flash_kernels()[1](
            grad.contiguous(), query, key, value, out, total_HQ, *call, **ctx.options
        )
        weights_HQ = (sink_H.to(total_HQ.dtype)[:, None] - total_HQ).exp()
        products_HQ = (grad.to(total_HQ.dtype) * out).sum(-1).t()
        grad_sink = -(weights_HQ * products_HQ).sum(1)
        return *grads, grad_sink.to(sink_H.dtype), None, None, None


def flash_kernels() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """torch's flash attention, which `varlen_attn` calls too: forward and backward."""
    aten = torch.ops.aten
    return aten._flash_attention_forward, aten._flash_attention_backward


@functools.cache
def _takes_gqa(kernel: Callable[..., Any]) -> bool:
    """Whether the kernel must be told of fewer heads of keys; torch 2.11 takes them as they are.

    Cached, because each layer needs it for each row.
    """
    return "enable_gqa" in inspect.signature(kernel).parameters


def has_varlen() -> bool:
    """Whether torch has the kernel, with scale and windows."""
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return False
    return "window_size" in inspect.signature(varlen_kernel()).parameters


def varlen_kernel() -> Callable[..., Any]:
    """torch's `varlen_attn`."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn
