"""The problem of the sequence-level cases: samples in pairs, and one objective of each kind."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from megapack.cost import LayerSplit
from megapack.dp_schedule import build_dp_schedule
from megapack.layout import Layout
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
    "value": Kind(objective=ValueLoss(clip=0.4), weighting="token-mean", value_head=True),
    "reward": Kind(objective=PairwiseReward(), value_head=True),
}

LAYOUTS = {
    "single": Layout(),
    "pp2_vpp2": Layout(pp=2, vpp=2),
    "pp2_vpp2_pad": Layout(pp=2, vpp=2, microbatch_group_size=12),
    "cp2_pp2_vpp2": Layout(cp=2, pp=2, vpp=2),
    "dp2_pp2_vpp2": Layout(dp=2, pp=2, vpp=2),
    "tp2_sp_pp2": Layout(tp=2, pp=2, sequence_parallel=True),
    "pp2_head_alone": Layout(pp=2),
}
SPLITS = {"pp2_head_alone": LayerSplit(pipeline_model_parallel_layout="Et*8|L")}
"""Layers that are split unevenly, by name of the layout."""


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
