"""Samples in pairs, and one objective of each kind that reads whole samples or what others said."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from megapack.dp_schedule import build_dp_schedule
from megapack.layout import Layout
from megapack.loss import GRPO, Correction, Distillation
from megapack.loss.preference import DPO, PairwiseReward
from megapack.loss.sequence import GSPO, ValueLoss
from megapack.plan import Plan
from megapack.samples import SampleBatch
from tests.dist import problem

# (prompt, response) tokens.
SIZES = [(5, 20), (2, 9), (4, 11), (1, 1), (3, 7), (12, 6)]
SIZES += [(9, 15), (6, 2), (1, 25), (8, 8), (10, 17), (2, 13)]
# (preferred, other): neighbours, and samples far from each other.
PAIRS = [(0, 11), (2, 1), (3, 8), (5, 4), (9, 6), (7, 10)]

TOPK = 8
"""Ids of the teacher at each token."""
SPOT = (6, 17)
"""A sample, and the token whose log-probs are far apart in one of the cases."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """An objective and the model that it trains."""

    objective: Any
    weighting: str = "seq-mean-token-mean"
    value_head: bool = False


KINDS = {
    "gspo": Kind(
        objective=GSPO(
            clip_low=0.6,
            clip_high=1.0,
            dual_clip=1.5,
            entropy_coef=0.03,
            kl_coef=0.1,
            kl_level="sequence",
        )
    ),
    "gspo_token": Kind(objective=GSPO(clip_low=0.6, clip_high=1.0, token_level=True)),
    "dpo": Kind(objective=DPO(beta=0.2, label_smoothing=0.1)),
    "tis": Kind(
        objective=GRPO(correction=Correction(high=1.2), kl_coef=0.1, entropy_coef=0.03),
        weighting="token-mean",
    ),
    "tis_sequence": Kind(
        objective=GSPO(
            clip_low=0.6, clip_high=1.0, correction=Correction(level="sequence", high=1.5)
        ),
    ),
    "seq_mask_tis": Kind(
        objective=GRPO(
            correction=Correction(
                kind="mask", level="geometric", low=0.9, high=1.1, weight_level="token"
            ),
            teacher_kl_coef=0.5,
        ),
        weighting="token-mean",
    ),
    "teacher_kl": Kind(objective=GRPO(teacher_kl_coef=0.5), weighting="token-mean"),
    "distill_forward": Kind(objective=Distillation(sft_coef=0.2), weighting="token-mean"),
    "distill_reverse": Kind(objective=Distillation(reverse_weight=1.0, tail="renormalize")),
    "value": Kind(objective=ValueLoss(clip=0.4), weighting="token-mean", value_head=True),
    "reward": Kind(objective=PairwiseReward(), value_head=True),
}


def make_batch() -> SampleBatch:
    """Samples with random fields; one response has masked tokens in its middle."""
    generator = torch.Generator().manual_seed(problem.SEED)

    def noise(scale: float, mean: float) -> list[torch.Tensor]:
        return [torch.randn(r, generator=generator) * scale + mean for _, r in SIZES]

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(0, problem.VOCAB_SIZE, (count,), generator=generator)

    signs = torch.ones(len(SIZES))
    signs[[other for _, other in PAIRS]] = -1.0
    batch = SampleBatch.from_prompt_response(
        [tokens(p) for p, _ in SIZES],
        [tokens(r) for _, r in SIZES],
        {
            "advantages": list(torch.randn(len(SIZES), generator=generator)),
            "old_logprobs": noise(0.5, -math.log(problem.VOCAB_SIZE)),
            "ref_logprobs": noise(0.5, -math.log(problem.VOCAB_SIZE)),
            "returns": noise(1.0, 0.3),
            "old_values": noise(1.0, 0.0),
            "pair_sign": list(signs),
        },
    )
    old = [batch.field("old_logprobs", i)[-r:] for i, (_, r) in enumerate(SIZES)]
    for name in ("rollout_logprobs", "teacher_logprobs"):
        pairs = zip(old, noise(0.3, 0.0), strict=True)
        batch.set_field(name, [logprobs + other for logprobs, other in pairs])
    topk = [
        (torch.randn(r, problem.VOCAB_SIZE, generator=generator) * 3).log_softmax(1).topk(TOPK)
        for _, r in SIZES
    ]
    batch.set_field("teacher_topk_ids", [indices for _, indices in topk])
    batch.set_field("teacher_topk_logprobs", [values for values, _ in topk])
    masks = [batch.response_mask(i).clone() for i in range(len(batch))]
    masks[6][12:15] = False
    batch.set_field("response_mask", masks)
    return batch


def make_plan(layout: Layout) -> Plan:
    """A plan with each pair in one micro-batch."""
    ids = [next(k for k, pair in enumerate(PAIRS) if i in pair) for i in range(len(SIZES))]
    return build_dp_schedule(
        make_batch().lengths, layout=layout, max_tokens_per_gpu=96, colocate_ids=ids
    )
