"""SDPA over the sequences of packed rows; runs on every device and in every precision."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from megapack.cost.sizes import FLASH_WIDTH
from megapack.model.attention.capped import capped_attention
from megapack.model.attention.packed import PackedAttention, gather_rows
from megapack.model.attention.paths import Paths, seen_QK
from megapack.model.attention.row import RowView


class PackedSDPA(PackedAttention):
    """`PackedAttention` with torch's SDPA, one call per run of sequences of equal sizes (`paths`).

    With capped scores it runs in torch's own operations, see `capped`.
    """

    score_cap: float | None = None
    """See `ModelConfig.attention_score_cap`."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, row: RowView) -> Tensor:
        """query [T, heads, d]; key [T, groups, d]; value [T, groups, v] -> [T, heads, v]."""
        paths = row.paths(self.window, max_queries=self.window)
        # Keys of whole samples on one rank are in their places.
        if row.cp > 1 or row.branches or self.window is not None:
            key, value = gather_rows(key, value, paths.order_K, row.cp_group)
        if self.score_cap is not None:
            return capped_attention(
                query,
                key,
                value,
                paths,
                cap=self.score_cap,
                scale=self.softmax_scale,
                window=self.window,
            )
        return path_causal_attention(
            query,
            key,
            value,
            paths,
            self.softmax_scale,
            self.dropout if self.training else 0.0,
            window=self.window,
            sink_H=self.softmax_offset,
        )


def path_causal_attention(
    query_QHD: Tensor,
    key_KGD: Tensor,
    value_KGD: Tensor,
    paths: Paths,
    scale: float,
    dropout: float = 0.0,
    *,
    window: int | None = None,
    sink_H: Tensor | None = None,
) -> Tensor:
    """Causal attention of each sequence of `paths`, whose last query sees its last key.

    Args:
        query_QHD: queries of all sequences, one after the other.
        key_KGD, value_KGD: gathered keys and values of all sequences. Neighbours with as many
            queries and keys run as one batch.
        scale: softmax scale.
        window: keys that a query sees, its own and those before it; None = all.
        sink_H: one more logit in the softmax of each head, of value 0; None = none.

    Returns:
        [Q, H, D].
    """
    outputs = []
    query = key = 0
    sizes = zip(paths.num_queries, paths.num_keys, strict=True)
    for (num_queries, num_keys), run in itertools.groupby(sizes):
        count = len(list(run))
        q = query_QHD[query : query + count * num_queries]
        k, v = (x[key : key + count * num_keys] for x in (key_KGD, value_KGD))
        query += len(q)
        key += len(k)
        q = q.unflatten(0, (count, num_queries)).transpose(1, 2)
        k, v = (x.unflatten(0, (count, num_keys)).transpose(1, 2) for x in (k, v))
        if sink_H is None:
            out = _masked(q, k, v, _causal_mask(q, k, window), scale, dropout)
        else:
            out = _with_sinks(q, k, v, sink_H, scale, dropout, window)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)


# Channels by which queries and keys get longer for sinks. Kernels on GPUs take multiples of 8.
_SINK_CHANNELS = 8


def _with_sinks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink_H: Tensor,
    scale: float,
    dropout: float,
    window: int | None,
) -> Tensor:
    """Causal attention with sinks: a first key of value 0, which all queries see.

    Its score is the sink by further channels, in which all other keys are 0. There are two of them,
    so that a sink has twice the digits of a narrow dtype.
    """
    mask = _causal_mask(q, k, window)
    if mask is None:
        # The first query is one more, so that the others still see the key at their own place.
        q = F.pad(q, (0, 0, 1, 0))
    else:
        mask = F.pad(mask, (1, 0), value=True)
    logits_H = sink_H.to(torch.promote_types(q.dtype, torch.float32)) / scale
    high_H = logits_H.to(q.dtype)
    low_H = (logits_H - high_H).to(q.dtype)
    channels_H2 = torch.stack([high_H, low_H], dim=-1)
    count, heads, num_queries, width = q.shape
    channels = F.pad(channels_H2, (0, _SINK_CHANNELS - 2))[:, None]
    q = torch.cat([q, channels.expand(count, heads, num_queries, _SINK_CHANNELS)], dim=-1)
    k = F.pad(k, (0, _SINK_CHANNELS, 1, 0))
    k[:, :, 0, width : width + 2] = 1
    value_width = v.shape[-1]
    # Fused kernels take one width. Further channels of zeros are zeros in the result.
    v = F.pad(v, (0, q.shape[-1] - value_width, 1, 0))
    out = _masked(q, k, v, mask, scale, dropout)[..., :value_width]
    return out[:, :, 1:] if mask is None else out


def _causal_mask(q: Tensor, k: Tensor, window: int | None) -> Tensor | None:
    """Which keys the last queries of samples see; None = the keys up to their own, and all are
    there."""
    num_queries = q.shape[2]
    num_keys = k.shape[2]
    if num_queries == num_keys and (window is None or window >= num_keys):
        return None
    # `is_causal` aligns the first query with the first key; here the last ones are aligned. The
    # mask has at most L^2 / (2 * cp) bytes for a sample of L tokens: 256 MiB for 32768 at cp=2.
    # With a window w it has at most 2 w^2.
    return seen_QK(num_queries, num_keys, window, q.device)


def _masked(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout: float
) -> Tensor:
    if q.shape[-1] > FLASH_WIDTH:
        # torch's fused kernel for such heads has as many of keys as of queries. Without it the
        # scores of all pairs of tokens would be in memory.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
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
