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
whose inputs are detached. Its gradient with respect to I, softmax(I) minus the target, is found in
the forward, where both are at hand.

Scores are computed for a chunk of queries at a time, and again in the backward, so that memory is
one chunk's times its keys. The code is torch's own operations: right everywhere, slow on a GPU,
where it computes all scores and masks.

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
from megapack.model.attention.packed import PackedAttention, gather_rows
from megapack.model.attention.paths import Chunk, Paths, query_chunks
from megapack.model.attention.row import RowView, layer_row
from megapack.model.carried import with_earlier_keys
from megapack.model.recurrent.scan import at_least_fp32
from megapack.rows.schedule_pass import SchedulePass


@dataclass(frozen=True, kw_only=True)
class IndexerSizes:
    """The sizes of a layer's indexer."""

    heads: int
    width: int
    """Channels of a head's queries, and of the keys, which all heads share."""
    top_k: int
    """Keys that a query attends to."""


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

    Args:
        sizes: of the indexer.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.sizes = IndexerSizes(
            heads=config.dsa_indexer_n_heads,
            width=config.dsa_indexer_head_dim,
            top_k=config.dsa_indexer_topk,
        )
        self.heads = config.num_attention_heads // config.tensor_model_parallel_size
        self.loss_coef = config.dsa_indexer_loss_coeff or 0.0
        self._pass: SchedulePass | None = None

    def follow(self, schedule_pass: SchedulePass | None) -> None:
        """Add the indexer's losses to this pass from now on; None: there are none."""
        self._pass = schedule_pass

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> Tensor:
        """[T, channels, 1] each -> [T, heads * v]; see `joined`."""
        row = layer_row(self, packed_seq_params, self.cp_group)
        key, value = with_earlier_keys(row, self, key, value)
        return self.attend(query, key, value, row)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, row: RowView) -> Tensor:
        """As `forward`, with the keys of a sample's earlier pieces before the row's."""
        key, value = (x.transpose(1, 2) for x in (key, value))
        paths = row.paths()
        key, value = gather_rows(key, value, paths.order_K, row.cp_group)
        sizes = self.sizes
        width = self.heads * self.head_width
        of_heads = [width, sizes.heads * sizes.width, sizes.heads]
        own_query, index_query, weight_QI = torch.split(query.squeeze(-1), of_heads, dim=-1)
        own_key, index_KC = torch.split(key.squeeze(1), [width, sizes.width], dim=-1)
        index_QIC = torch.unflatten(index_query, -1, (sizes.heads, -1))
        out, loss_sum = sparse_attention(
            torch.unflatten(own_query, -1, (self.heads, -1)),
            torch.unflatten(own_key, -1, (self.heads, -1)),
            torch.unflatten(value.squeeze(1), -1, (self.heads, -1)),
            Index(index_QIC, weight_QI, index_KC),
            paths,
            top_k=sizes.top_k,
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
    call = _Call(paths, top_k, scale, loss)
    out, loss_sum = _Sparse.apply(query_QHD, key_KHD, value_KHV, *index, call)  # type: ignore[no-untyped-call]
    return out, None if loss is None else loss_sum


class _Call(NamedTuple):
    paths: Paths
    top_k: int
    scale: float
    loss: IndexerLoss | None


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


class _Sparse(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        index_query: Tensor,
        index_weight: Tensor,
        index_key: Tensor,
        call: _Call,
    ) -> Any:
        index = Index(index_query, index_weight, index_key)
        out_QHV = query.new_empty(*query.shape[:2], value.shape[-1])
        loss_sum = at_least_fp32(query.new_zeros(()))
        index_grads = None
        if call.loss is not None:
            index_grads = Index(*(torch.zeros_like(at_least_fp32(part)) for part in index))
        for chunk in query_chunks(call.paths, max(query.shape[1], index_query.shape[1])):
            scored = _Scored.of(chunk, index, call.top_k)
            probs_HQK = _probabilities(query, key, chunk, scored.chosen_QK, call.scale)
            values = at_least_fp32(value[chunk.keys]).transpose(0, 1)
            out_QHV[chunk.queries] = (probs_HQK @ values).transpose(0, 1).to(out_QHV.dtype)
            if call.loss is not None:
                assert index_grads is not None
                loss_sum += _add_loss(probs_HQK, scored, chunk, call.loss, index_grads)
        ctx.save_for_backward(query, key, value, *index, out_QHV)
        ctx.call = call
        ctx.index_grads = index_grads
        ctx.mark_non_differentiable(loss_sum)
        return out_QHV, loss_sum

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
        query, key, value, *index, out = ctx.saved_tensors
        call = ctx.call
        grads = [torch.zeros_like(at_least_fp32(x)) for x in (query, key, value)]
        for chunk in query_chunks(call.paths, max(query.shape[1], index[0].shape[1])):
            scored = _Scored.of(chunk, Index(*index), call.top_k)
            probs_HQK = _probabilities(query, key, chunk, scored.chosen_QK, call.scale)
            q, g, o = (at_least_fp32(x[chunk.queries]).transpose(0, 1) for x in (query, grad, out))
            k, v = (at_least_fp32(x[chunk.keys]).transpose(0, 1) for x in (key, value))
            # P = softmax(s), D = <dO, O>: dS = P * (dO V^T - D).
            slopes_HQK = g @ v.transpose(1, 2) - (g * o).sum(-1, keepdim=True)
            slopes_HQK *= probs_HQK * call.scale
            grads[0][chunk.queries] = (slopes_HQK @ k).transpose(0, 1)
            grads[1][chunk.keys] += (slopes_HQK.transpose(1, 2) @ q).transpose(0, 1)
            grads[2][chunk.keys] += (probs_HQK.transpose(1, 2) @ g).transpose(0, 1)
        own = [total.to(x.dtype) for total, x in zip(grads, (query, key, value), strict=True)]
        if ctx.index_grads is None:
            return (*own, None, None, None, None)
        pairs = zip(ctx.index_grads, index, strict=True)
        return (*own, *(total.to(x.dtype) for total, x in pairs), None)


class _Scored(NamedTuple):
    """A chunk's scores by the indexer."""

    query_QIC: Tensor
    weight_QI: Tensor
    key_KC: Tensor
    products_QIK: Tensor
    """relu(<q, k>)."""
    scores_QK: Tensor
    chosen_QK: Tensor

    @classmethod
    def of(cls, chunk: Chunk, index: Index, top_k: int) -> _Scored:
        query_QIC = at_least_fp32(index.query_QIC[chunk.queries])
        weight_QI = at_least_fp32(index.weight_QI[chunk.queries])
        key_KC = at_least_fp32(index.key_KC[chunk.keys])
        products_QIK = (query_QIC @ key_KC.T).relu_()
        scores_QK = (weight_QI[:, None] @ products_QIK).squeeze(1)
        chosen_QK = chosen_keys(scores_QK, chunk.visible_QK(scores_QK.device), top_k)
        return cls(query_QIC, weight_QI, key_KC, products_QIK, scores_QK, chosen_QK)


def _probabilities(
    query: Tensor, key: Tensor, chunk: Chunk, chosen_QK: Tensor, scale: float
) -> Tensor:
    """The softmax of each head over the chosen keys, [H, Q, K]."""
    query_HQD = at_least_fp32(query[chunk.queries]).transpose(0, 1)
    key_HDK = at_least_fp32(key[chunk.keys]).permute(1, 2, 0)
    scores_HQK = (query_HQD @ key_HDK).mul_(scale)
    return scores_HQK.masked_fill_(~chosen_QK, -torch.inf).softmax(-1)


def _add_loss(
    probs_HQK: Tensor, scored: _Scored, chunk: Chunk, loss: IndexerLoss, grads: Index
) -> Tensor:
    """The chunk's sum of copies * KL; adds its gradients to `grads`."""
    target_QK = probs_HQK.sum(0)
    if loss.tp_group is not None and loss.tp_group.size() > 1:
        dist.all_reduce(target_QK, group=loss.tp_group)
    # Each head's probabilities sum to 1.
    target_QK = target_QK / target_QK.sum(-1, keepdim=True)
    hidden_QK = ~scored.chosen_QK
    log_QK = scored.scores_QK.masked_fill(hidden_QK, -torch.inf).log_softmax(-1)
    copies_Q1 = loss.copies_Q[chunk.queries, None].to(log_QK.dtype)
    slopes_QK = (log_QK.exp() - target_QK) * (copies_Q1 * loss.factor)
    grads.weight_QI[chunk.queries] = (scored.products_QIK @ slopes_QK[..., None]).squeeze(-1)
    slopes_QIK = slopes_QK[:, None] * scored.weight_QI[..., None] * (scored.products_QIK > 0)
    grads.query_QIC[chunk.queries] = slopes_QIK @ scored.key_KC
    grads.key_KC[chunk.keys] += torch.einsum("qik,qic->kc", slopes_QIK, scored.query_QIC)
    kl_QK = torch.xlogy(target_QK, target_QK) - target_QK * log_QK.masked_fill(hidden_QK, 0.0)
    return (kl_QK * copies_Q1).sum()
