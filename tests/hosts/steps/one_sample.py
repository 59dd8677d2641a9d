"""The reference of slime's and miles' first step: one sample at a time, every weight written out.

On the first step a sample's log-probs are those of the forward-only pass, so that the ratio is 1:
the loss is the weighted sum of -advantage - entropy_coef * entropy, and its gradient that of
-advantage * log-prob - entropy_coef * entropy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def one_sample_step(
    chunk: Any,
    samples: Sequence[Any],
    rewards: Sequence[float],
    *,
    per_token: bool,
    entropy_coef: float,
) -> tuple[float, float]:
    """The loss and the gradient norm of one step on all samples.

    Args:
        chunk: the whole model, in Megatron's DDP.
        samples: of the host's class; tokens, response_length, loss_mask, rollout_id and images are
            read.
        rewards: advantage of each sample.
        per_token: every token has one share; otherwise every rollout has one, which its tokens
            divide. A rollout of two samples with 3 and 7 loss tokens gives each 1/10 of its share.
    """
    weights = token_weights(samples, per_token=per_token)
    chunk.zero_grad_buffer()
    total = 0.0
    for sample, reward, weight in zip(samples, rewards, weights, strict=True):
        logprobs_R, entropy_R = _responses(chunk, sample)
        mask_R = torch.tensor(sample.loss_mask, dtype=torch.float32)
        penalty_R = entropy_coef * entropy_R
        (weight * mask_R * (-reward * logprobs_R - penalty_R)).sum().backward()
        total += float((weight * mask_R * (-reward - penalty_R.detach())).sum())
    trained = (param for param in chunk.parameters() if param.requires_grad)
    squares = (param.main_grad.double().square().sum() for param in trained)
    return total, float(sum(squares)) ** 0.5


def token_weights(samples: Sequence[Any], *, per_token: bool) -> list[float]:
    """The weight of each loss token of a sample; samples without loss tokens have no say."""
    num_tokens: dict[Any, int] = {}
    for sample in samples:
        group = "all" if per_token else sample.rollout_id
        num_tokens[group] = num_tokens.get(group, 0) + sum(sample.loss_mask)
    num_rollouts = len({sample.rollout_id for sample in samples})
    if per_token:
        return [1 / num_tokens["all"]] * len(samples)
    return [1 / max(1, num_tokens[sample.rollout_id]) / num_rollouts for sample in samples]


def _responses(chunk: Any, sample: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the response's tokens, and the entropy where each was drawn: [response] each."""
    tokens_1T = torch.tensor(sample.tokens)[None]
    logits_1TV = chunk(
        input_ids=tokens_1T,
        position_ids=None,
        attention_mask=None,
        packed_seq_params=_one_sequence(tokens_1T.shape[1]),
        **(getattr(sample, "multimodal_train_inputs", None) or {}),
    )
    all_TV = logits_1TV[0, -sample.response_length - 1 : -1].log_softmax(-1)
    logprobs_R = all_TV.gather(1, tokens_1T[0, -sample.response_length :, None])[:, 0]
    return logprobs_R, -(all_TV.exp() * all_TV).sum(-1)


def _one_sequence(num_tokens: int) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    ends = torch.tensor([0, num_tokens], dtype=torch.int32)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=num_tokens,
        max_seqlen_kv=num_tokens,
    )
