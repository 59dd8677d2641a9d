"""PPO's critic in the main job: its model, values, advantages and optimizer steps.

    old log-probs, rewards -> values -> GAE -> advantages, returns -> the critic's steps

The critic is a second model with a value head, on the same ranks and in the rows of the same plans
as the policy. Both take a step on the same samples: the policy on advantages, the critic on
returns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megapack.job.config.sections import TrainConfig
from megapack.job.data.dataset import Dataset
from megapack.job.data.gae import Floats, explained_variance, gae, token_rewards, whitened
from megapack.job.gpt.settings import Settings
from megapack.job.train.learner import Learner, Update
from megapack.job.train.passes import PlannedBatch
from megapack.layout import Layout
from megapack.ranks.agree import agree
from megapack.ranks.links import Ranks
from megapack.samples import SampleBatch

REWARDS = "rewards"
"""Name of a field with one number per sample."""

FIELDS = ("old_values", "advantages", "returns")
"""Fields of a batch that `Critic.add_advantages` fills in: one value per token."""


class Critic(Learner):
    """The critic of one run on one rank. The constructor is a collective of all ranks.

    Args:
        data: the samples of the batches.
        config, layout, policy, reduction, ranks, device: see `Learner`.
    """

    def __init__(
        self,
        config: TrainConfig,
        layout: Layout,
        policy: Sequence[Any],
        data: Dataset,
        reduction: Settings,
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        super().__init__(
            config, layout, policy=policy, reduction=reduction, ranks=ranks, device=device
        )
        self._config = config
        self._data = data
        self._device = device

    def add_advantages(self, batch: PlannedBatch) -> None:
        """Fill in `FIELDS` from the samples' rewards and the critic's values. A collective.

        The batch has `REWARDS`, and with `objective.kl_in_reward_coef` the log-probs of the policy
        and the reference.
        """
        samples = batch.samples
        samples.set_field("old_values", self.passes.outputs(batch, "values"))
        agree(lambda: self._estimate(batch), device=self._device)

    def step(
        self, batch: PlannedBatch, index: int, *, num_steps: int, predicted_s: float | None
    ) -> Update:
        """Take the critic's optimizer step, whose metrics begin with `critic_`. A collective.

        Args:
            index, num_steps, predicted_s: see `Learner.take_step`.
        """
        update = self.take_step(
            batch,
            index,
            name=f"the critic's step {num_steps + 1}",
            num_steps=num_steps,
            predicted_s=predicted_s,
        )
        metrics = {**update.metrics, "explained_variance": self._explained_variance(batch)}
        own = {f"critic_{name}": value for name, value in metrics.items()}
        return dataclasses.replace(update, metrics=own)

    def _estimate(self, batch: PlannedBatch) -> None:
        """Set advantages and returns of the kept samples; local work."""
        samples = batch.samples
        objective = self._config.objective
        masks = self._masks(batch)
        counts = [int(mask.sum()) for mask in masks.values()]
        values = _loss_tokens(samples, "old_values", masks)
        rewards = token_rewards([float(samples.field(REWARDS, i)) for i in masks], counts)
        if objective.kl_in_reward_coef:
            log_ratio = _loss_tokens(samples, "old_logprobs", masks)
            log_ratio -= _loss_tokens(samples, "ref_logprobs", masks)
            rewards -= objective.kl_in_reward_coef * log_ratio
        advantages = gae(
            rewards, values, counts, gamma=objective.gamma, gae_lambda=objective.gae_lambda
        )
        returns = advantages + values
        if self._config.critic.whiten_advantages:
            advantages = whitened(advantages)
        _set_loss_tokens(samples, "advantages", masks, advantages)
        _set_loss_tokens(samples, "returns", masks, returns)

    def _explained_variance(self, batch: PlannedBatch) -> float | None:
        """The part of the returns' variance that the old values explain."""
        masks = self._masks(batch)
        values = _loss_tokens(batch.samples, "old_values", masks)
        return explained_variance(values, _loss_tokens(batch.samples, "returns", masks))

    def _masks(self, batch: PlannedBatch) -> dict[int, Tensor]:
        """Which tokens count in the loss, of each sample that a step trains on; ascending.

        The batch holds the masks of this rank's samples, but whitening needs all samples.
        """
        kept = sorted(i for step in batch.plan.steps for i in step.kept_samples)
        return {i: torch.from_numpy(self._data.tokens(int(batch.numbers[i])).counts) for i in kept}


def _loss_tokens(samples: SampleBatch, name: str, masks: Mapping[int, Tensor]) -> Floats:
    """A field at the loss tokens of these samples, one sample after the other; float64."""
    parts = [samples.field(name, i)[mask] for i, mask in masks.items()]
    return torch.cat(parts).double().numpy()


def _set_loss_tokens(
    samples: SampleBatch, name: str, masks: Mapping[int, Tensor], flat: Floats
) -> None:
    """The inverse of `_loss_tokens`: sets the field, 0 at all other tokens."""
    values: list[Tensor] = [torch.zeros(())] * len(samples)
    start = 0
    for i, mask in masks.items():
        count = int(mask.sum())
        value = torch.zeros(samples.length(i))
        value[mask] = torch.from_numpy(flat[start : start + count]).float()
        values[i] = value
        start += count
    samples.set_field(name, values)
