"""Objectives: one loss per token, never a mean, with weights that are fixed before a step runs.

Modules:
    correction: weights of policy losses by the log-probs of an inference engine
    distillation: the divergence from a teacher's most likely tokens
    token: SFT, PPO, GRPO and the weights of response tokens
    sequence: GSPO, which needs whole samples, and the value loss
    preference: DPO and pairwise rewards, which need pairs of samples
"""

from megapack.loss.correction import Correction
from megapack.loss.distillation import Distillation
from megapack.loss.preference import DPO, PairwiseReward, pair_signs
from megapack.loss.sequence import GSPO, ValueLoss
from megapack.loss.token import (
    GRPO,
    PPO,
    SFT,
    AnyObjective,
    LossWeighting,
    Objective,
    kl_estimate,
    sample_weights,
)

__all__ = [
    "DPO",
    "GRPO",
    "GSPO",
    "PPO",
    "SFT",
    "PairwiseReward",
    "ValueLoss",
    "Correction",
    "Distillation",
    "AnyObjective",
    "Objective",
    "LossWeighting",
    "kl_estimate",
    "pair_signs",
    "sample_weights",
]
