"""Log-probs of labels from hidden states, in fp32, a chunk of tokens at a time.

The logits of a chunk exist only while the chunk is computed, in the forward and again in the
backward pass, so the full fp32 logits of a row never exist. With tensor parallelism each rank holds
a slice of the vocabulary and the ranks exchange three numbers per token: the largest logit, the sum
of exponentials and the label's logit. The entropy needs a fourth.

Shape suffixes: R response positions, C positions of a chunk, H hidden, V vocabulary on this rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class VocabHead:
    """The vocabulary projection of one rank and its settings."""

    weight_VH: Tensor
    tp_group: Any = None
    """Ranks that share the vocabulary; None for one rank."""
    chunk_tokens: int = 1024
    """Positions whose logits exist at one time."""
    temperature: float = 1.0
    """Divisor of the logits."""
    with_entropy: bool = False
    """Also compute the entropy of the next-token distribution."""

    @property
    def first_token(self) -> int:
        """First token id of this rank's slice of the vocabulary."""
        rank = 0 if self.tp_group is None else self.tp_group.rank()
        return int(rank * self.weight_VH.shape[0])

    def all_reduce(self, x: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Reduce over the ranks that share the vocabulary, in place."""
        if self.tp_group is not None and self.tp_group.size() > 1:
            dist.all_reduce(x, op=op, group=self.tp_group)
        return x


def vocab_parallel_logprobs(
    hidden_RH: Tensor, labels_R: Tensor, head: VocabHead
) -> tuple[Tensor, Tensor | None]:
    """Log-probs (nats, fp32) of labels, and the entropy (nats) if `head.with_entropy`.

    Args:
        hidden_RH: final hidden states at response positions, the same on every rank that shares the
            vocabulary; R may be 0. Each of these ranks gets the full gradient.
        labels_R: ids in the whole vocabulary; the log-prob of an id outside it is NaN.

    Returns:
        logprobs_R, differentiable in the hidden states and the weight.
        entropy_R, differentiable too; None without `with_entropy`.
    """
    logprobs_R, entropy_R = _Logprobs.apply(hidden_RH, head.weight_VH, labels_R, head)
    return logprobs_R, entropy_R if head.with_entropy else None


def _logits(hidden_CH: Tensor, head: VocabHead) -> Tensor:
    logits_CV = (hidden_CH @ head.weight_VH.t()).float()
    return logits_CV if head.temperature == 1.0 else logits_CV.div_(head.temperature)


def _local_labels(labels_C: Tensor, head: VocabHead) -> tuple[Tensor, Tensor]:
    """Column of each label on this rank (0 if on another rank), and whether it is on this rank."""
    local_C = labels_C - head.first_token
    here_C = (local_C >= 0) & (local_C < head.weight_VH.shape[0])
    return torch.where(here_C, local_C, 0), here_C


def _in_vocabulary(labels_C: Tensor, head: VocabHead) -> Tensor:
    size = 1 if head.tp_group is None else head.tp_group.size()
    return (labels_C >= 0) & (labels_C < size * head.weight_VH.shape[0])


class _Logprobs(torch.autograd.Function):
    """Saves two numbers per token instead of logits; the backward pass recomputes each chunk."""

    @staticmethod
    def forward(
        ctx: Any, hidden_RH: Tensor, weight_VH: Tensor, labels_R: Tensor, head: VocabHead
    ) -> tuple[Tensor, Tensor]:
        num_tokens = hidden_RH.shape[0]
        logprobs_R, log_z_R, entropy_R = hidden_RH.new_zeros(
            (3, num_tokens), dtype=torch.float32
        ).unbind()
        for start in range(0, num_tokens, head.chunk_tokens):
            chunk = slice(start, start + head.chunk_tokens)
            logits_CV = _logits(hidden_RH[chunk], head)
            max_C = head.all_reduce(logits_CV.amax(1), dist.ReduceOp.MAX)
            local_C, here_C = _local_labels(labels_R[chunk], head)
            # In place from here on: a second and a third [C, V] would double and triple the peak.
            logits_CV.sub_(max_C[:, None])
            label_logit_C = logits_CV.gather(1, local_C[:, None])[:, 0]
            exp_CV = logits_CV.exp() if head.with_entropy else logits_CV.exp_()
            sums = torch.stack([exp_CV.sum(1), torch.where(here_C, label_logit_C, 0.0)])
            if head.with_entropy:
                sums = torch.cat([sums, logits_CV.mul_(exp_CV).sum(1)[None]])
            del logits_CV, exp_CV
            head.all_reduce(sums)
            # A label outside the vocabulary must not give a plausible log-prob. Raising would need
            # a device sync; NaN does not.
            invalid_C = ~_in_vocabulary(labels_R[chunk], head)
            logprobs_R[chunk] = (sums[1] - sums[0].log()).masked_fill(invalid_C, math.nan)
            log_z_R[chunk] = max_C + sums[0].log()
            if head.with_entropy:
                entropy_R[chunk] = sums[0].log() - sums[2] / sums[0]
        ctx.head = head
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden_RH, weight_VH, labels_R, log_z_R, entropy_R)
        return logprobs_R, entropy_R

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs_R: Tensor | None, grad_entropy_R: Tensor | None
    ) -> tuple[Tensor, Tensor | None, None, None]:
        hidden_RH, weight_VH, labels_R, log_z_R, entropy_R = ctx.saved_tensors
        head: VocabHead = ctx.head
        label_grad_R = torch.zeros_like(log_z_R) if grad_logprobs_R is None else grad_logprobs_R
        grad_hidden_RH = torch.zeros_like(hidden_RH)
        grad_weight_VH = None
        if ctx.needs_input_grad[1]:
            grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32)
        for start in range(0, hidden_RH.shape[0], head.chunk_tokens):
            chunk = slice(start, start + head.chunk_tokens)
            grad_logits_CV = _grad_logits(
                _logits(hidden_RH[chunk], head),
                labels_R[chunk],
                log_z_R[chunk, None],
                label_grad_R[chunk, None],
                None
                if grad_entropy_R is None
                else (entropy_R[chunk, None], grad_entropy_R[chunk, None]),
                head,
            )
            grad_hidden_RH[chunk] = grad_logits_CV @ weight_VH
            if grad_weight_VH is not None:
                grad_weight_VH += (grad_logits_CV.t() @ hidden_RH[chunk]).float()
            # Freed before the next chunk's logits are allocated.
            del grad_logits_CV
        head.all_reduce(grad_hidden_RH)
        if grad_weight_VH is not None:
            grad_weight_VH = grad_weight_VH.to(weight_VH.dtype)
        return grad_hidden_RH, grad_weight_VH, None, None


def _grad_logits(
    logits_CV: Tensor,
    labels_C: Tensor,
    log_z_C1: Tensor,
    grad_C1: Tensor,
    entropy_and_grad_C1: tuple[Tensor, Tensor] | None,
    head: VocabHead,
) -> Tensor:
    """The gradient with respect to the logits, computed in their memory.

    d logprob / d logits = onehot - p;  d entropy / d logits = -p (log p + entropy)
    """
    log_p_CV = logits_CV.sub_(log_z_C1)
    if entropy_and_grad_C1 is None:
        grad_CV = log_p_CV.exp_().mul_(-grad_C1)
    else:
        entropy_C1, grad_entropy_C1 = entropy_and_grad_C1
        p_CV = log_p_CV.exp()
        grad_CV = log_p_CV.add_(entropy_C1).mul_(grad_entropy_C1).add_(grad_C1).mul_(p_CV).neg_()
    local_C, here_C = _local_labels(labels_C, head)
    grad_CV.scatter_add_(1, local_C[:, None], torch.where(here_C[:, None], grad_C1, 0.0))
    if head.temperature != 1.0:
        grad_CV.div_(head.temperature)
    return grad_CV.to(head.weight_VH.dtype)
