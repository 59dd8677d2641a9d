"""Log-probs of labels from hidden states, in fp32, a chunk of tokens at a time.

Logits are fp32 also where weights are bf16: `products` multiplies without rounding to 16 bits. The
logits of a chunk exist only while the chunk is computed, in the forward and again in the backward
pass, so the full fp32 logits of a row never exist. With tensor parallelism each rank holds a slice
of the vocabulary and the ranks exchange three numbers per token: the largest logit, the sum of
exponentials and the label's logit. The entropy needs a fourth. A position may have several labels,
such as the k ids that a teacher finds most likely; its logits are the same, and the ranks exchange
the logit of each.

Megatron pads the vocabulary with rows that are no ids. They get no probability: their logits are
-inf, and their gradients exactly 0. The products still include them. A slice of 50,257 columns
would leave the rows of the logits unaligned, which is slower than 47 columns more.

In the backward, the gradient of a chunk's logits is rounded to the weights' dtype, as in any 16-bit
layer. Weight gradients are summed over chunks in fp32: in DDP's fp32 gradient (`main_grad`) if the
weight has one, else in a matrix of their own.

Shape suffixes: R response positions, C positions of a chunk, H hidden, V vocabulary on this rank, K
labels of a position.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megapack.cost.head import default_chunk_tokens
from megapack.model.parameters import has_hooks
from megapack.model.products import add_mm_fp32, mm_fp32

# Positions whose probabilities exist beside the logits where the entropy has a gradient. 256
# positions of 151,936 columns take 156 MB.
_ENTROPY_TOKENS = 256

_FP32 = torch.float32


@dataclass(frozen=True, kw_only=True)
class VocabHead:
    """The vocabulary projection of one rank and its settings."""

    weight_VH: Tensor
    num_ids: int | None = None
    """Ids of the whole vocabulary; the rows after them are padding. None = no row is padding."""
    tp_group: Any = None
    """Ranks that share the vocabulary; None for one rank."""
    chunk_tokens: int | None = None
    """Positions whose logits exist at one time; None = `cost.head.default_chunk_tokens`."""
    temperature: float = 1.0
    """Divisor of the logits."""
    logit_cap: float | None = None
    """Logits l are cap * tanh(l / cap), before the temperature; None = they are not capped."""
    tied: bool = True
    """Whether the weight may also be an embedding's on this rank, which adds to its gradient."""
    with_entropy: bool = False
    """Also compute the entropy of the next-token distribution."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks that share the vocabulary."""
        return 1 if self.tp_group is None else int(self.tp_group.size())

    @property
    def vocab_size(self) -> int:
        """Rows of the weight on all ranks, with padding."""
        return self.num_ranks * self.weight_VH.shape[0]

    @property
    def first_token(self) -> int:
        """First token id of this rank's slice of the vocabulary."""
        rank = 0 if self.tp_group is None else self.tp_group.rank()
        return int(rank * self.weight_VH.shape[0])

    @property
    def num_rows(self) -> int:
        """Rows of this rank's slice that are ids; the rest is padding. It may be 0.

        With 320 ids, padded to 384 and split over 4 ranks: 96, 96, 96 and 32.
        """
        rows = self.weight_VH.shape[0]
        if self.num_ids is None:
            return rows
        return min(max(self.num_ids - self.first_token, 0), rows)

    def chunks(self, num_tokens: int) -> Iterator[slice]:
        """The positions of each chunk."""
        size = self.chunk_tokens or default_chunk_tokens(self.vocab_size, self.num_ranks)
        return _slices(num_tokens, size)

    def all_reduce(self, x: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Reduce over the ranks that share the vocabulary, in place."""
        if self.num_ranks > 1:
            dist.all_reduce(x, op=op, group=self.tp_group)
        return x


def vocab_parallel_logprobs(
    hidden_RH: Tensor, labels_R: Tensor, head: VocabHead
) -> tuple[Tensor, Tensor | None]:
    """Log-probs (nats, fp32) of labels, and the entropy (nats) if `head.with_entropy`.

    Args:
        hidden_RH: final hidden states at response positions, the same on every rank that shares the
            vocabulary; R may be 0. Each of these ranks gets the full gradient.
        labels_R: ids in the whole vocabulary, [R] or [R, K]; the log-prob of an id outside it, or
            of a row of padding, is NaN.

    Returns:
        logprobs_R, of the labels' shape, differentiable in the hidden states and the weight.
        entropy_R, differentiable too; None without `with_entropy`.
    """
    labels_RK = labels_R if labels_R.dim() == 2 else labels_R[:, None]
    logprobs_RK, entropy_R = _Logprobs.apply(hidden_RH, head.weight_VH, labels_RK, head)
    logprobs_R = logprobs_RK if labels_R.dim() == 2 else logprobs_RK[:, 0]
    return logprobs_R, entropy_R if head.with_entropy else None


def _logits(hidden_CH: Tensor, head: VocabHead) -> Tensor:
    logits_CV = mm_fp32(hidden_CH, head.weight_VH.t())
    if head.logit_cap is not None:
        logits_CV.div_(head.logit_cap).tanh_().mul_(head.logit_cap)
    if head.temperature != 1.0:
        logits_CV.div_(head.temperature)
    logits_CV[:, head.num_rows :] = -math.inf
    return logits_CV


def _slices(size: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, size)) for start in range(0, size, step))


def _local_labels(labels_C: Tensor, head: VocabHead) -> tuple[Tensor, Tensor]:
    """Column of each label on this rank (0 if on another rank), and whether it is on this rank."""
    local_C = labels_C - head.first_token
    here_C = (local_C >= 0) & (local_C < head.num_rows)
    return torch.where(here_C, local_C, 0), here_C


def in_vocabulary(labels_C: Tensor, head: VocabHead) -> Tensor:
    """Whether each label is an id of the vocabulary, on whatever rank."""
    num_ids = head.vocab_size if head.num_ids is None else head.num_ids
    return (labels_C >= 0) & (labels_C < num_ids)


class _Logprobs(torch.autograd.Function):
    """Saves two numbers per token instead of logits; the backward pass recomputes each chunk."""

    @staticmethod
    def forward(
        ctx: Any, hidden_RH: Tensor, weight_VH: Tensor, labels_RK: Tensor, head: VocabHead
    ) -> tuple[Tensor, Tensor]:
        num_tokens = hidden_RH.shape[0]
        logprobs_RK = hidden_RH.new_zeros(labels_RK.shape, dtype=torch.float32)
        log_z_R, entropy_R = hidden_RH.new_zeros((2, num_tokens), dtype=torch.float32).unbind()
        for chunk in head.chunks(num_tokens):
            logits_CV = _logits(hidden_RH[chunk], head)
            max_C = head.all_reduce(logits_CV.amax(1), dist.ReduceOp.MAX)
            local_CK, here_CK = _local_labels(labels_RK[chunk], head)
            # In place from here on: a second [C, V] would double the peak.
            logits_CV.sub_(max_C[:, None])
            label_logits_CK = logits_CV.gather(1, local_CK)
            exp_CV = logits_CV.exp_()
            sums = [torch.where(here_CK, label_logits_CK, 0.0), exp_CV.sum(1, keepdim=True)]
            if head.with_entropy:
                # entr(e) = -e log e, 0 where e is: the logits again, without keeping them.
                sums.append(torch.special.entr(exp_CV, out=exp_CV).sum(1, keepdim=True))
            del logits_CV, exp_CV
            summed = head.all_reduce(torch.cat(sums, dim=1))
            num_labels = labels_RK.shape[1]
            sum_C = summed[:, num_labels]
            log_sum_C = sum_C.log()
            # A label outside the vocabulary must not give a plausible log-prob. Raising would need
            # a device sync; NaN does not.
            invalid_CK = ~in_vocabulary(labels_RK[chunk], head)
            label_logprobs_CK = summed[:, :num_labels] - log_sum_C[:, None]
            logprobs_RK[chunk] = label_logprobs_CK.masked_fill(invalid_CK, math.nan)
            log_z_R[chunk] = max_C + log_sum_C
            if head.with_entropy:
                entropy_R[chunk] = log_sum_C + summed[:, -1] / sum_C
        ctx.head = head
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden_RH, weight_VH, labels_RK, log_z_R, entropy_R)
        return logprobs_RK, entropy_R

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs_RK: Tensor | None, grad_entropy_R: Tensor | None
    ) -> tuple[Tensor, Tensor | None, None, None]:
        hidden_RH, weight_VH, labels_RK, log_z_R, entropy_R = ctx.saved_tensors
        head: VocabHead = ctx.head
        label_grad_RK = grad_logprobs_RK
        if label_grad_RK is None:
            label_grad_RK = torch.zeros_like(labels_RK, dtype=_FP32)
        grad_hidden_RH = torch.zeros_like(hidden_RH)
        grad_weight_VH = _gradient_sum(head.weight_VH) if ctx.needs_input_grad[1] else None
        for chunk in head.chunks(hidden_RH.shape[0]):
            grad_logits_CV = _grad_logits(
                _logits(hidden_RH[chunk], head),
                labels_RK[chunk],
                log_z_R[chunk, None],
                label_grad_RK[chunk],
                None
                if grad_entropy_R is None
                else (entropy_R[chunk, None], grad_entropy_R[chunk, None]),
                head,
            )
            grad_hidden_RH[chunk] = grad_logits_CV @ weight_VH
            if grad_weight_VH is not None:
                add_mm_fp32(grad_weight_VH, grad_logits_CV.t(), hidden_RH[chunk])
            # Freed before the next chunk's logits are allocated.
            del grad_logits_CV
        head.all_reduce(grad_hidden_RH)
        if grad_weight_VH is not None:
            if main_gradient(head.weight_VH) is None:
                grad_weight_VH = grad_weight_VH.to(weight_VH.dtype)
            else:
                grad_weight_VH = rest_of_gradient(head.weight_VH, tied=head.tied)
        return grad_hidden_RH, grad_weight_VH, None, None


def _gradient_sum(weight_VH: Tensor) -> Tensor:
    main_grad = main_gradient(weight_VH)
    return torch.zeros_like(weight_VH, dtype=_FP32) if main_grad is None else main_grad


def main_gradient(weight_VH: Tensor) -> Tensor | None:
    """The fp32 matrix of Megatron's DDP to which a backward may add the weight's gradient itself.

    Megatron's DDP gives a weight a `main_grad`, and its backward hook adds the gradient that
    autograd computes to it. Like Megatron's fused layers, the head adds to it directly: without a
    second [V, H] in fp32, and without rounding the sum over chunks to bf16. Not if the weight has
    hooks, which must see its gradient.
    """
    main_grad: Tensor | None = getattr(weight_VH, "main_grad", None)
    is_ddp = hasattr(weight_VH, "grad_added_to_main_grad") and not has_hooks(weight_VH)
    return main_grad if is_ddp and main_grad is not None and main_grad.dtype == _FP32 else None


def rest_of_gradient(weight: Any, *, tied: bool) -> Tensor:
    """What autograd gets for a weight whose gradient is already in `main_gradient`.

    Zeros, and not None, which DDP's hook refuses with `overlap_grad_reduce`. The hook need not read
    them where `grad_added_to_main_grad` says so. It must for a tied weight, to add what the
    embedding's backward gives.
    """
    if not tied:
        weight.grad_added_to_main_grad = True
    return torch.zeros_like(weight)


def _grad_logits(
    logits_CV: Tensor,
    labels_CK: Tensor,
    log_z_C1: Tensor,
    grad_CK: Tensor,
    entropy_and_grad_C1: tuple[Tensor, Tensor] | None,
    head: VocabHead,
) -> Tensor:
    """The gradient with respect to the logits, computed in their memory.

    d logprob / d logits = onehot - p;  d entropy / d logits = -p (log p + entropy)

    With a cap, that of the logits before it.
    """
    slopes_CV = None
    if head.logit_cap is not None:
        slopes_CV = 1 - (logits_CV * (head.temperature / head.logit_cap)).square_()
        # Logits are -inf there.
        slopes_CV[:, head.num_rows :] = 0.0
    grad_CV = logits_CV.sub_(log_z_C1)
    grad_C1 = grad_CK.sum(1, keepdim=True)
    if entropy_and_grad_C1 is None:
        grad_CV.exp_().mul_(-grad_C1)
    else:
        entropy_C1, grad_entropy_C1 = entropy_and_grad_C1
        for part in _slices(grad_CV.shape[0], _ENTROPY_TOKENS):
            log_p_CV = grad_CV[part]
            p_CV = log_p_CV.exp()
            log_p_CV.add_(entropy_C1[part]).mul_(grad_entropy_C1[part]).add_(grad_C1[part])
            log_p_CV.mul_(p_CV).neg_()
        # p is 0 there and log p is -inf, whose product is no number.
        grad_CV[:, head.num_rows :] = 0.0
    local_CK, here_CK = _local_labels(labels_CK, head)
    grad_CV.scatter_add_(1, local_CK, torch.where(here_CK, grad_CK, 0.0))
    if head.temperature != 1.0:
        grad_CV.div_(head.temperature)
    if slopes_CV is not None:
        grad_CV.mul_(slopes_CV)
    return grad_CV.to(head.weight_VH.dtype)
