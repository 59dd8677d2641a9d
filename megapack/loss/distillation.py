"""Distillation: the divergence between a teacher's next-token distribution and the model's.

The teacher's distribution comes with the data, as its k most likely ids at each response token and
their log-probs. The head gives the model's log-probs of these ids out of the whole vocabulary, a
chunk of positions at a time, so the logits of a row never exist at once.

Shape suffixes: R response positions, K ids of the teacher, J ids of a divergence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from megapack.base.choices import Tail
from megapack.errors import ConfigError, DataError
from megapack.loss.token import Fields, Losses
from megapack.plan.plan import Plan
from megapack.samples import SampleBatch

TEACHER_IDS = "teacher_topk_ids"
"""Name of a field: the ids that a teacher finds most likely for each token, [tokens, k]."""
TEACHER_TOPK = "teacher_topk_logprobs"
"""Name of a field: their log-probs (nats) under the teacher."""
TOPK_LOGPROBS = "topk_logprobs"
"""What such an objective reads, see `Objective`."""

# Least probability of all other ids, as far as fp32 can tell 1 - sum from 0.
_LEAST_REST = 1e-6


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """The KL divergence of the model from a teacher, over the teacher's k most likely ids.

        batch.set_field("teacher_topk_ids", ids)
        batch.set_field("teacher_topk_logprobs", logprobs)
        adapter.step(plan, batch, objective=Distillation(reverse_weight=0.5))

    Forward: sum of p_teacher * (log p_teacher - log p_model), which covers all of the teacher's
    modes. Reverse: sum of p_model * (log p_model - log p_teacher), which keeps to some of them.

    Reads:
        teacher_topk_ids: per sample int [response tokens, k], the teacher's most likely ids.
        teacher_topk_logprobs: their log-probs (nats) under the teacher, of the same shape.

    Metrics: kl_forward, kl_reverse, nll (nats); teacher_mass, student_mass (probability of the k).

    Raises:
        ConfigError: an unknown tail, or a number out of range.
    """

    reads = TOPK_LOGPROBS
    needs_entropy = False
    required_fields = (TEACHER_IDS, TEACHER_TOPK)
    wide_fields = required_fields

    reverse_weight: float = 0.0
    """Share of the reverse divergence in the loss, in [0, 1]: 0 is forward, 1 is reverse."""
    tail: Tail = "lump"
    """The other ids "lump" together as one id, are left out ("ignore"), or all sums "renormalize".
    With "lump" the loss is a divergence, of at most that over the whole vocabulary."""
    sft_coef: float = 0.0
    """Factor of the response's negative log-likelihood, which is added to the loss."""

    def __post_init__(self) -> None:
        if self.tail not in get_args(Tail):
            raise ConfigError(f"unknown tail {self.tail!r}; set lump, ignore or renormalize")
        if not 0 <= self.reverse_weight <= 1 or not 0 <= self.sft_coef < math.inf:
            raise ConfigError(
                f"reverse_weight={self.reverse_weight} and sft_coef={self.sft_coef}; set them in "
                "[0, 1] and to at least 0"
            )

    def check(self, batch: SampleBatch, plan: Plan, step: int) -> None:
        """Raise DataError unless ids and log-probs of samples have one shape, [tokens, k]."""
        for i in plan.steps[step].kept_samples:
            ids, logprobs = (batch.field(name, i) for name in self.required_fields)
            # A number stands in for samples that another rank packs.
            if ids.dim() == logprobs.dim() == 0:
                continue
            if ids.dim() != 2 or ids.shape != logprobs.shape or ids.is_floating_point():
                raise DataError(
                    f"sample {i} has {ids.dtype} {TEACHER_IDS} of shape {tuple(ids.shape)} and "
                    f"{TEACHER_TOPK} of shape {tuple(logprobs.shape)}; give integer ids and "
                    "log-probs of one shape [tokens, k]"
                )

    def __call__(self, logprobs_R1K: Tensor, entropy_R: Tensor | None, fields: Fields) -> Losses:
        """See `Objective`; metrics: kl_forward, kl_reverse, nll, and the probability of the k ids
        under both, teacher_mass and student_mass.

        Args:
            logprobs_R1K: the model's log-probs of the label, and of the teacher's ids.
        """
        model_RK = logprobs_R1K[:, 1:]
        # Without positions there may be no K.
        teacher_RK = fields[TEACHER_TOPK].reshape(model_RK.shape)
        model_RJ = self._distribution(model_RK)
        teacher_RJ = self._distribution(teacher_RK)
        difference_RJ = teacher_RJ - model_RJ
        forward_R = (teacher_RJ.exp() * difference_RJ).sum(1)
        reverse_R = -(model_RJ.exp() * difference_RJ).sum(1)
        nll_R = -logprobs_R1K[:, 0]
        share = self.reverse_weight
        loss_R = (1 - share) * forward_R + share * reverse_R + self.sft_coef * nll_R
        return loss_R, {
            "kl_forward": forward_R,
            "kl_reverse": reverse_R,
            "nll": nll_R,
            "teacher_mass": teacher_RK.exp().sum(1),
            "student_mass": model_RK.exp().sum(1),
        }

    def _distribution(self, logprobs_RK: Tensor) -> Tensor:
        if self.tail == "renormalize":
            return logprobs_RK - logprobs_RK.logsumexp(1, keepdim=True)
        if self.tail == "ignore":
            return logprobs_RK
        rest_R1 = 1 - logprobs_RK.exp().sum(1, keepdim=True)
        return torch.cat([logprobs_RK, rest_R1.clamp(min=_LEAST_REST).log()], dim=1)
