"""Sparse attention of DeepSeek-V3.2 over packed rows: each query attends to its top-k keys.

An indexer scores the keys that a query may see: those on its path (see `paths`), which are its own
sample's and none after it. The score of query t and key s is, over the indexer's heads,

    I(t, s) = sum_i w(t, i) * relu(<q(t, i), k(s)>)

The query's softmax is over the k keys with the highest scores; of equal scores the earlier key's
counts. A query that sees at most k keys attends to all of them, as in dense attention.

The choice has no gradient. The indexer learns by a loss of its own: per query the KL divergence of
the main attention's distribution, the mean over heads, and softmax(I), both over the chosen keys
(DeepSeek-V3.2, section 2.1, the sparse stage). A step's loss is the sum over the N real tokens of
its samples, over N, mean over layers in metrics; so packing cannot change it. A token that samples
share counts once per sample, and padding does not count. It reaches the indexer's weights only,
whose inputs are detached.

The code is torch's own operations in chunks of queries (see `chunked`): right everywhere, slow on a
GPU, where it computes all scores and masks.

Shape suffixes: Q queries and K keys of a chunk, or of the whole row in `sparse_attention`; H heads,
D channels of queries and keys, V of values; I heads of the indexer, C their channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megapack.errors import ConfigError, ScheduleError
from megapack.model.attention.chunked import Chunk, by_chunks
from megapack.model.attention.packed import PackedAttention, gather_rows
from megapack.model.attention.paths import Paths
from megapack.model.attention.row import RowView
from megapack.rows.schedule_pass import SchedulePass


class Index(NamedTuple):
    """What the indexer makes of a row's tokens."""

    query_QIC: Tensor
    weight_QI: Tensor
    """Of each head, with the scale of the scores."""
    key_KC: Tensor


@dataclass(frozen=True, kw_only=True)
class IndexerLoss:
    """How the queries of a row count in the indexer's loss."""

    copies_Q: Tensor
    """int64: number of samples that each query's token belongs to; 0 for padding."""
    factor: float
    """The coefficient over the step's tokens; of the gradient only."""
    tp_group: Any = None
    """The ranks that have the other heads; None: there are none."""


class SparseAttention(PackedAttention):
    """Core attention of a layer with an indexer; see the module.

    Queries, keys and values come from `SparseLatentAttention`, as [T, channels, 1] with what its
    indexer makes of them: so they are recomputed, gathered and carried as any keys. Outside of the
    adapter's passes there is no indexer loss.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.heads = config.num_attention_heads // config.tensor_model_parallel_size
        self.loss_coef = config.dsa_indexer_loss_coeff or 0.0
        self._pass: SchedulePass | None = None

    def follow(self, schedule_pass: SchedulePass | None) -> None:
        """Add the indexer's losses to this pass from now on; None: there are none."""
        self._pass = schedule_pass

    def attend(self, query: Tensor, key: Tensor, value: Tensor, row: RowView) -> Tensor:
        """[T, channels, 1] each -> [T, heads * v], see `joined`; keys of a sample's earlier pieces
        are before the row's."""
        key, value = (x.transpose(1, 2) for x in (key, value))
        paths = row.paths()
        key, value = gather_rows(key, value, paths.order_K, row.cp_group)
        index_heads, index_width = self.config.dsa_indexer_n_heads, self.config.dsa_indexer_head_dim
        width = self.heads * self.head_width
        of_heads = [width, index_heads * index_width, index_heads]
        own_query, index_query, weight_QI = torch.split(query.squeeze(-1), of_heads, dim=-1)
        own_key, index_KC = torch.split(key.squeeze(1), [width, index_width], dim=-1)
        index_QIC = torch.unflatten(index_query, -1, (index_heads, -1))
        out, loss_sum = sparse_attention(
            torch.unflatten(own_query, -1, (self.heads, -1)),
            torch.unflatten(own_key, -1, (self.heads, -1)),
            torch.unflatten(value.squeeze(1), -1, (self.heads, -1)),
            Index(index_QIC, weight_QI, index_KC),
            paths,
            top_k=self.config.dsa_indexer_topk,
            scale=self.softmax_scale,
            loss=self._loss(row),
        )
        self._add_loss(loss_sum)
        return out.flatten(1)

    def _loss(self, row: RowView) -> IndexerLoss | None:
        weight = None if self._pass is None else self._pass.token_weight
        # The first forward of a checkpointed layer has no gradients; the second one has the loss.
        if not self.loss_coef or weight is None or not torch.is_grad_enabled():
            return None
        if row.copies_T is None:
            raise ScheduleError(
                "the indexer's loss needs a row of ScheduleAdapter, which knows the tokens of "
                "samples; set model.indexer_loss_coef=0"
            )
        factor = self.loss_coef * weight
        return IndexerLoss(copies_Q=row.copies_T, factor=factor, tp_group=self.tp_group)

    def _add_loss(self, loss_sum: Tensor | None) -> None:
        # All tensor-parallel ranks have the same loss.
        if loss_sum is not None and (self.tp_group is None or self.tp_group.rank() == 0):
            assert self._pass is not None
            assert self._pass.token_weight is not None
            self._pass.add_router_loss("indexer_loss", loss_sum * self._pass.token_weight)

    def _refuse_unsupported(self, config: Any, mask: Any, attention_type: str) -> None:
        super()._refuse_unsupported(config, mask, attention_type)
        if config.attention_dropout:
            raise ConfigError(
                f"attention_dropout={config.attention_dropout}: sparse attention has none; set it "
                "to 0"
            )


def joined(*parts: Tensor) -> Tensor:
    """Tensors [T, ...] as one [T, channels, 1].

    The last dimension is 1 in queries, keys and values alike: since 0.19 Megatron pads values that
    are narrower than queries.
    """
    return torch.cat([part.flatten(1) for part in parts], dim=1)[..., None]


def sparse_attention(
    query_QHD: Tensor,
    key_KHD: Tensor,
    value_KHV: Tensor,
    index: Index,
    paths: Paths,
    *,
    top_k: int,
    scale: float,
    loss: IndexerLoss | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Softmax of each query over its top-k keys; differentiable.

    Args:
        query_QHD: queries of all sequences, one after the other.
        key_KHD, value_KHV: gathered keys and values of all sequences.
        index: of the same queries and keys.
        paths: the sequences, whose last query sees the last key.
        top_k: keys that a query attends to.
        scale: softmax scale.
        loss: of the indexer; its gradient is added whatever becomes of the second result. None:
            there is none, and the index gets no gradient.

    Returns:
        [Q, H, V], and the sum over queries of copies * KL; None without a loss.
    """
    if loss is None:
        index = Index(*(part.detach() for part in index))

    def attend(
        chunk: Chunk,
        query_QHD: Tensor,
        query_QIC: Tensor,
        weight_QI: Tensor,
        key_KHD: Tensor,
        value_KHV: Tensor,
        key_KC: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        products_QIK = (query_QIC @ key_KC.T).relu()
        index_QK = (weight_QI[:, None] @ products_QIK).squeeze(1)
        hidden_QK = chunk.hidden_QK(index_QK.device)
        hidden_QK = ~chosen_keys(index_QK.detach(), ~hidden_QK, top_k)
        scores_HQK = query_QHD.transpose(0, 1) @ key_KHD.permute(1, 2, 0) * scale
        probs_HQK = scores_HQK.masked_fill(hidden_QK, -torch.inf).softmax(-1)
        out_QHV = (probs_HQK @ value_KHV.transpose(0, 1)).transpose(0, 1)
        if loss is None:
            return out_QHV, None
        target_QK = _mean_over_heads(probs_HQK.detach(), loss.tp_group)
        log_QK = index_QK.masked_fill(hidden_QK, -torch.inf).log_softmax(-1)
        log_QK = log_QK.masked_fill(hidden_QK, 0.0)
        kl_QK = torch.xlogy(target_QK, target_QK) - target_QK * log_QK
        return out_QHV, (kl_QK * loss.copies_Q[chunk.queries, None]).sum()

    heads = max(query_QHD.shape[1], index.query_QIC.shape[1])
    out, loss_sum = by_chunks(
        attend,
        paths,
        heads,
        [query_QHD, index.query_QIC, index.weight_QI],
        [key_KHD, value_KHV, index.key_KC],
        0.0 if loss is None else loss.factor,
    )
    return out, None if loss is None else loss_sum


def _mean_over_heads(probs_HQK: Tensor, tp_group: Any) -> Tensor:
    """The mean over the heads of all tensor-parallel ranks."""
    sum_QK = probs_HQK.sum(0)
    if tp_group is not None and tp_group.size() > 1:
        dist.all_reduce(sum_QK, group=tp_group)
    # Each head's probabilities sum to 1.
    return sum_QK / sum_QK.sum(-1, keepdim=True)


def chosen_keys(scores_QK: Tensor, visible_QK: Tensor, top_k: int) -> Tensor:
    """bool [Q, K]: of each query's visible keys the top k, of equal scores the first ones.

    >>> visible = torch.tensor([[True, True, True, False]])
    >>> chosen_keys(torch.tensor([[1.0, 0.0, 1.0, 5.0]]), visible, top_k=1)
    tensor([[ True, False, False, False]])
    """
    if scores_QK.shape[1] <= top_k:
        return visible_QK
    scores_QK = scores_QK.masked_fill(~visible_QK, -torch.inf)
    least_Q1 = scores_QK.topk(top_k, dim=-1).values[:, -1:]
    above_QK = scores_QK > least_Q1
    equal_QK = (scores_QK == least_Q1) & visible_QK
    room_Q1 = top_k - above_QK.sum(-1, keepdim=True)
    return above_QK | (equal_QK & (equal_QK.cumsum(-1) <= room_Q1))
