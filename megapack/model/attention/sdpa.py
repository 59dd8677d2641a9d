"""Per-sample SDPA over packed rows; runs on every device and in every precision."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megapack.model.attention.merged import merged_attention
from megapack.model.attention.packed import PackedAttention, gather_rows
from megapack.model.attention.paths import Paths, chunk_ends
from megapack.model.attention.row import RowView


class PackedSDPA(PackedAttention):
    """`PackedAttention` with torch's SDPA, one call per run of samples of equal length.

    Where samples share prefixes or are in pieces, calls are merged on a CPU (see `merged`). torch
    has no such kernel in fp32 on other devices, where keys are gathered instead (see `paths`).
    """

    def attend(self, query: Tensor, key: Tensor, value: Tensor, row: RowView) -> Tensor:
        """query [T, heads, d]; key [T, groups, d]; value [T, groups, v] -> [T, heads, v]."""
        if row.branches and query.device.type != "cpu":
            return self._attend_paths(query, key, value, row)
        if row.cp > 1:
            key, value = gather_rows(key, value, row.assembly_order_K, row.cp_group)
        if row.branches:
            return merged_attention(query, key, value, row.blocks, self.softmax_scale)
        return packed_causal_attention(
            query,
            key,
            value,
            row.padded_lengths,
            self.softmax_scale,
            self.dropout if self.training else 0.0,
            cp=row.cp,
            cp_rank=row.cp_rank,
        )

    def _attend_paths(self, query: Tensor, key: Tensor, value: Tensor, row: RowView) -> Tensor:
        key, value = gather_rows(key, value, row.paths.order_K, row.cp_group)
        return path_causal_attention(query, key, value, row.paths, self.softmax_scale)


def path_causal_attention(
    query_QHD: Tensor, key_KGD: Tensor, value_KGD: Tensor, paths: Paths, scale: float
) -> Tensor:
    """Causal attention of each sequence of `paths`, whose last query sees its last key.

    Args:
        query_QHD: queries of all sequences, one after the other.
        key_KGD, value_KGD: gathered keys and values of all sequences.

    Returns:
        [Q, H, D].
    """
    parts = zip(
        query_QHD.split(paths.num_queries),
        key_KGD.split(paths.num_keys),
        value_KGD.split(paths.num_keys),
        strict=True,
    )
    outputs = []
    for part in parts:
        q, k, v = (x.transpose(0, 1)[None] for x in part)
        outputs.append(_causal_to_the_end(q, k, v, scale, 0.0)[0].transpose(0, 1))
    return torch.cat(outputs)


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
        query_QHD: queries of the row, samples one after the other; with cp > 1 those of the rank's
            slice (`rows.slices.slice_positions`), Q = T / cp.
        key_TGD: keys of the whole row.
        value_TGD: values of the whole row.
        lengths: tokens of each sample; they sum to T. Neighbours of equal length (such as the dummy
            samples of a row's tail) run as one batch.
        scale: softmax scale.
        cp: number of context-parallel ranks.
        cp_rank: this rank among them.

    Returns:
        [Q, H, D].
    """
    outputs = []
    start = 0
    for length, count in _runs(lengths):
        rows = slice(start, start + length * count)
        mine = slice(rows.start // cp, rows.stop // cp)
        q = query_QHD[mine].unflatten(0, (count, length // cp)).transpose(1, 2)
        k, v = (x[rows].unflatten(0, (count, length)).transpose(1, 2) for x in (key_TGD, value_TGD))
        ends = chunk_ends(length, cp, cp_rank)
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


def _causal_to_the_end(q: Tensor, k: Tensor, v: Tensor, scale: float, dropout: float) -> Tensor:
    """Causal attention of the last queries of samples; all are [count, heads, tokens, d]."""
    num_queries = q.shape[2]
    num_keys = k.shape[2]
    mask = None
    if num_queries < num_keys:
        # `is_causal` aligns the first query with the first key; here the last ones are aligned. The
        # mask has at most L^2 / (2 * cp) bytes for a sample of L tokens: 256 MiB for 32768 at cp=2.
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


def _runs(lengths: list[int]) -> list[tuple[int, int]]:
    """Runs of equal lengths as (length, count): [5, 3, 3] -> [(5, 1), (3, 2)]."""
    runs: list[tuple[int, int]] = []
    for length in lengths:
        if runs and runs[-1][0] == length:
            runs[-1] = (length, runs[-1][1] + 1)
        elif length > 0:
            runs.append((length, 1))
    return runs
