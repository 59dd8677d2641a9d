"""Objectives: one loss per token and never a mean, with weights fixed before anything runs.

token        SFT, PPO, GRPO and sample weights
sequence     GSPO and value losses, which see whole samples
preference   DPO and pairwise rewards, which see pairs
"""

from megapack.loss.sequence import GSPO, AnyObjective, SequenceObjective, ValueLoss
from megapack.loss.token import (
    GRPO,
    PPO,
    SFT,
    LossWeighting,
    Objective,
    kl_estimate,
    sample_weights,
)

__all__ = [
    "GRPO",
    "PPO",
    "SFT",
    "Objective",
    "sample_weights",
    "kl_estimate",
    "LossWeighting",
    "GSPO",
    "ValueLoss",
    "AnyObjective",
    "SequenceObjective",
]
