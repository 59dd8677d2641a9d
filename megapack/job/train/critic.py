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
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from megapack.job.config.sections import OptimConfig, TrainConfig
from megapack.job.data.gae import Floats, explained_variance, gae, token_rewards, whitened
from megapack.job.gpt.optimizer import build_lr_schedule, build_optimizer
from megapack.job.gpt.settings import Settings
from megapack.job.hf.load import LoadedWeights, load_hf_weights
from megapack.job.train.models import build_run_model
from megapack.job.train.passes import BatchPasses, BatchPlanner, PlannedBatch
from megapack.job.train.update import Update, take_step
from megapack.layout import Layout
from megapack.loss.sequence import ValueLoss
from megapack.model.head import unwrapped
from megapack.ranks.agree import agree
from megapack.ranks.links import Ranks
from megapack.samples import SampleBatch
from megapack.schedule.adapter import ScheduleAdapter

REWARDS = "rewards"
"""Name of a field with one number per sample."""

FIELDS = ("old_values", "advantages", "returns")
"""Fields of a batch that `Critic.add_advantages` fills in: one value per token."""

_HEAD = "output_layer."


class Critic:
    """The critic of one run on one rank. The constructor is a collective of all ranks.

    Args:
        policy: the policy's chunks with their initial weights, which become the critic's, unless
            `critic.hf_path` has its own.
        planner: the planner of the batches.
        reduction: as the policy's, see `build_model`.
        device: see `agree`.

    Attributes:
        chunks: this rank's chunks; the last one of the last stage has the value head.
        loaded: what `critic.hf_path` gave; None without it.
        optimizer: Megatron's, for these chunks.
        passes: runs the value model.
    """

    def __init__(
        self,
        config: TrainConfig,
        layout: Layout,
        policy: Sequence[Any],
        planner: BatchPlanner,
        *,
        reduction: Settings,
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        self._config = config
        self._device = device
        self._data = planner.data
        self._optim = critic_optim(config)
        folder = config.critic.hf_path
        self.chunks = build_run_model(
            config,
            config.critic_model,
            layout,
            reduction,
            value_head=True,
            # The policy's folder comes with the copy, and its value head begins with zeros.
            draws_weights=config.model.hf_path is None and folder is None,
        )
        self.loaded: LoadedWeights | None = None
        if folder is None:
            agree(lambda: copy_weights(policy, self.chunks), device=device)
        else:
            self.loaded = load_hf_weights(self.chunks, folder, device=device)
        self.optimizer = build_optimizer(self._optim, self.chunks, config.model.dtype == "bf16")
        adapter = ScheduleAdapter(
            self.chunks,
            layout=layout,
            head="value",
            executor=config.train.executor,
            ranks=ranks,
        )
        self.passes = BatchPasses(
            config.objective,
            adapter,
            self.optimizer,
            objective=ValueLoss(clip=config.critic.clip),
            entropy_interval=0,
            device=device,
        )
        self._ranks = ranks
        self._schedule: OptimizerParamScheduler | None = None
        # The last batch and its explained variance, which is the same in all of its steps.
        self._explained: tuple[PlannedBatch, float | None] | None = None

    def expect(self, total_steps: int, num_steps: int) -> None:
        """Set up the learning rate schedule of a run, of which some steps may have been taken."""
        self._schedule = build_lr_schedule(self._optim, self.optimizer, total_steps)
        self._schedule.step(increment=num_steps)

    def add_advantages(self, batch: PlannedBatch) -> None:
        """Fill in `FIELDS` from the samples' rewards and the critic's values. A collective.

        The batch has `REWARDS`, and with `objective.kl_in_reward_coef` the log-probs of the policy
        and the reference.
        """
        samples = batch.samples
        samples.set_field("old_values", self.passes.outputs(batch, "values"))
        agree(lambda: self._estimate(batch), device=self._device)

    def step(
        self,
        batch: PlannedBatch,
        index: int,
        *,
        num_steps: int,
        predicted_s: float | None,
    ) -> Update:
        """Take the critic's optimizer step, whose metrics begin with `critic_`. A collective.

        Args:
            index, num_steps, predicted_s: see `take_step`.
        """
        assert self._schedule is not None
        update = take_step(
            *(self.passes, self.optimizer, self._schedule, self._ranks, batch, index),
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
        if self._explained is None or self._explained[0] is not batch:
            self._explained = batch, self._explained_by_values(batch)
        return self._explained[1]

    def _explained_by_values(self, batch: PlannedBatch) -> float | None:
        masks = self._masks(batch)
        values = _loss_tokens(batch.samples, "old_values", masks)
        return explained_variance(values, _loss_tokens(batch.samples, "returns", masks))

    def _masks(self, batch: PlannedBatch) -> dict[int, Tensor]:
        """Which tokens count in the loss, of each sample that a step trains on; ascending.

        The batch holds the masks of this rank's samples, but whitening needs all samples.
        """
        kept = sorted(i for step in batch.plan.steps for i in step.kept_samples)
        return {i: torch.from_numpy(self._data.tokens(int(batch.numbers[i])).counts) for i in kept}


def critic_optim(config: TrainConfig) -> OptimConfig:
    """The section `optim` with the critic's learning rate; the lowest rate changes with it."""
    optim = config.optim
    lr = config.critic.lr
    if lr is None:
        return optim
    min_lr = optim.min_lr * (lr / optim.lr) if optim.lr else 0.0
    return dataclasses.replace(optim, lr=lr, min_lr=min(min_lr, lr))


def copy_weights(policy: Sequence[Any], critic: Sequence[Any]) -> None:
    """Copy all of the policy's weights but the head into the critic's chunks; local work.

    Both have the same layout, so parameters of one name in a chunk have the same shape. Expert
    biases are copied too.
    """
    with torch.no_grad():
        for source, target in zip(policy, critic, strict=True):
            tensors = _tensors(source)
            for name, tensor in _tensors(target).items():
                if not name.startswith(_HEAD):
                    tensor.copy_(tensors[name])


def _tensors(chunk: Any) -> dict[str, Tensor]:
    model = unwrapped(chunk)
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


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
