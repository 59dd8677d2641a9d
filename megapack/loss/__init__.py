"""Objectives: one loss per token, never a mean, with weights that are fixed before a step runs.

Modules:
    correction: weights of policy losses by the log-probs of an inference engine
    distillation: the divergence from a teacher's most likely tokens
    token: SFT, PPO, GRPO and the weights of response tokens
    sequence: GSPO, which needs whole samples, and the value loss
    preference: DPO and pairwise rewards, which need pairs of samples
"""

from megapack.loss.correction import Correction as Correction
from megapack.loss.distillation import Distillation as Distillation
from megapack.loss.preference import DPO as DPO
from megapack.loss.preference import PairwiseReward as PairwiseReward
from megapack.loss.preference import pair_signs as pair_signs
from megapack.loss.sequence import GSPO as GSPO
from megapack.loss.sequence import ValueLoss as ValueLoss
from megapack.loss.token import GRPO as GRPO
from megapack.loss.token import PPO as PPO
from megapack.loss.token import SFT as SFT
from megapack.loss.token import AnyObjective as AnyObjective
from megapack.loss.token import LossWeighting as LossWeighting
from megapack.loss.token import Objective as Objective
from megapack.loss.token import kl_estimate as kl_estimate
from megapack.loss.token import sample_weights as sample_weights
