"""The reference for sequence-level objectives: one unpadded sample or pair at a time.

Losses are written as in their papers: as means over samples or pairs, without per-token weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megapack.job.config.sections import ModelConfig
from megapack.samples import SampleBatch
from tests.dist import problem
from tests.dist.exactness.reference import (
    build,
    draw_weights,
    log_distributions,
    logprobs_and_entropy,
)
from tests.dist.losses.sequence_problem import PAIRS, make_batch


class Score(torch.nn.Linear):
    def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(hidden), None


class SequenceReference:
    """A stock model, and the losses of each objective on it."""

    def __init__(
        self,
        value_head: bool,
        *,
        settings: ModelConfig | None = None,
        batch: SampleBatch | None = None,
        pairs: Sequence[tuple[int, int]] = PAIRS,
    ) -> None:
        self.batch: SampleBatch = batch or make_batch()
        self.pairs = pairs
        default = problem.OTHER_MODEL if value_head else problem.MODEL
        settings = settings or problem.shallow(default)
        self.model: GPTModel = build(settings)
        if value_head:
            self.model.output_layer = Score(self.model.config.hidden_size, 1, bias=False)
            group = torch.distributed.group.WORLD
            draw_weights(self.model, settings, group)

    @property
    def trained(self) -> list[int]:
        """The samples that have response tokens."""
        return [i for i, count in enumerate(self.batch.num_loss_tokens) if count]

    def response(self, name: str, i: int) -> Tensor:
        """A field at response tokens; a field with one number per sample stays one number."""
        value = self.batch.field(name, i)
        return value if value.dim() == 0 else value[1:][self.mask(i)]

    def mask(self, i: int) -> Tensor:
        return self.batch.response_mask(i)[1:]

    def forward(self, i: int) -> tuple[Tensor, Tensor]:
        """Log-probs and entropy at all positions."""
        return logprobs_and_entropy(self.model, self.batch.tokens(i), 1.0)

    def logprobs(self, i: int) -> tuple[Tensor, Tensor]:
        """Log-probs and entropy at response tokens."""
        logp, entropy = self.forward(i)
        return logp[self.mask(i)], entropy[self.mask(i)]

    def values(self, i: int) -> Tensor:
        """The values at every position of the sample."""
        tokens = self.batch.tokens(i)
        length = tokens.numel()
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
        values: Tensor = self.model(tokens[None], torch.arange(length)[None], mask)[0, :, 0]
        return values

    def gspo(self) -> Tensor:
        losses = []
        for i in self.trained:
            logp, entropy = self.logprobs(i)
            a = self.response("advantages", i)
            s = (logp - self.response("old_logprobs", i)).mean().exp()
            loss = -torch.min(s * a, s.clip(0.4, 2.0) * a)
            if a < 0:
                loss = torch.min(loss, -1.5 * a)
            x = (self.response("ref_logprobs", i) - logp).mean()
            losses.append(loss + 0.1 * (x.exp() - x - 1) - 0.03 * entropy.mean())
        return torch.stack(losses).mean()

    def gspo_token(self) -> Tensor:
        """GSPO's loss: with one advantage per sample, the token-level gradient is the same."""
        losses = []
        for i in self.trained:
            logp, _ = self.logprobs(i)
            a = self.response("advantages", i)
            s = (logp - self.response("old_logprobs", i)).mean().exp()
            losses.append(-torch.min(s * a, s.clip(0.4, 2.0) * a))
        return torch.stack(losses).mean()

    def _engine_ratios(self, i: int) -> Tensor:
        return (self.response("old_logprobs", i) - self.response("rollout_logprobs", i)).exp()

    def _clipped(self, ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
        return -torch.min(ratio * advantage, ratio.clip(low, high) * advantage)

    def tis(self) -> Tensor:
        losses = []
        for i in self.trained:
            logp, entropy = self.logprobs(i)
            ratio = (logp - self.response("old_logprobs", i)).exp()
            policy = self._clipped(ratio, self.response("advantages", i), 0.8, 1.2)
            x = self.response("ref_logprobs", i) - logp
            weights = self._engine_ratios(i).clip(max=1.2)
            losses.append(weights * policy + 0.1 * (x.exp() - x - 1) - 0.03 * entropy)
        return torch.cat(losses).mean()

    def tis_sequence(self) -> Tensor:
        losses = []
        for i in self.trained:
            logp, _ = self.logprobs(i)
            s = (logp - self.response("old_logprobs", i)).mean().exp()
            policy = self._clipped(s, self.response("advantages", i), 0.4, 2.0)
            losses.append(self._engine_ratios(i).prod().clip(max=1.5) * policy)
        return torch.stack(losses).mean()

    def _less_teacher(self, i: int) -> Tensor:
        """Advantages less 0.5 times the KL to the teacher at the sampled tokens."""
        apart = self.response("old_logprobs", i) - self.response("teacher_logprobs", i)
        return self.response("advantages", i) - 0.5 * apart

    def teacher_kl(self) -> Tensor:
        losses = []
        for i in self.trained:
            logp, _ = self.logprobs(i)
            ratio = (logp - self.response("old_logprobs", i)).exp()
            losses.append(self._clipped(ratio, self._less_teacher(i), 0.8, 1.2))
        return torch.cat(losses).mean()

    def seq_mask_tis(self) -> Tensor:
        losses = []
        for i in self.trained:
            logp, _ = self.logprobs(i)
            old = self.response("old_logprobs", i)
            own = self._less_teacher(i)
            ratios = self._engine_ratios(i)
            kept = 0.9 <= ratios.log().mean().exp() <= 1.1
            losses.append(ratios * kept * self._clipped((logp - old).exp(), own, 0.8, 1.2))
        return torch.cat(losses).mean()

    def distributions(self, i: int) -> tuple[Tensor, Tensor, Tensor]:
        """NLL of labels, and log-probs of the teacher's ids under the model and the teacher."""
        tokens = self.batch.tokens(i)
        log_p = log_distributions(self.model, tokens, 1.0)[0][:-1][self.mask(i)]
        labels = tokens[1:][self.mask(i)]
        ids = self.response("teacher_topk_ids", i)
        nll = -log_p.gather(1, labels[:, None])[:, 0]
        return nll, log_p.gather(1, ids), self.response("teacher_topk_logprobs", i)

    def distill_forward(self) -> Tensor:
        losses = []
        for i in self.trained:
            nll, model, teacher = self.distributions(i)
            p, q = teacher.exp(), model.exp()
            rest = 1 - p.sum(1)
            kl = (p * (p / q).log()).sum(1) + rest * (rest / (1 - q.sum(1))).log()
            losses.append(kl + 0.2 * nll)
        return torch.cat(losses).mean()

    def distill_reverse(self) -> Tensor:
        losses = []
        for i in self.trained:
            _, model, teacher = self.distributions(i)
            q, p = model.softmax(1), teacher.softmax(1)
            losses.append((q * (q / p).log()).sum(1).mean())
        return torch.stack(losses).mean()

    def dpo(self) -> Tensor:
        losses = []
        for pair in self.pairs:
            won, lost = (
                (self.logprobs(i)[0] - self.response("ref_logprobs", i)).sum() for i in pair
            )
            p = torch.sigmoid(0.2 * (won - lost))
            losses.append(-0.9 * p.log() - 0.1 * (1 - p).log())
        return torch.stack(losses).mean()

    def value(self) -> Tensor:
        losses = []
        for i in range(len(self.batch)):
            v = self.values(i)[:-1][self.mask(i)]
            target = self.response("returns", i)
            old = self.response("old_values", i)
            clipped = torch.clip(v, old - 0.4, old + 0.4)
            losses.append(0.5 * torch.max((v - target) ** 2, (clipped - target) ** 2))
        return torch.cat(losses).mean()

    def reward(self) -> Tensor:
        margins = [self.values(i)[-1] - self.values(k)[-1] for i, k in self.pairs]
        return -torch.sigmoid(torch.stack(margins)).log().mean()
