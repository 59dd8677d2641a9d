"""A model that the run trains, the policy or a critic: its chunks, optimizer, passes and steps."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from megapack.job.config.sections import OptimConfig, TrainConfig
from megapack.job.data.tokenizer import ByteTokenizer
from megapack.job.gpt.build import build_model
from megapack.job.gpt.optimizer import build_lr_schedule, build_optimizer, check_norm
from megapack.job.gpt.settings import Settings
from megapack.job.gpt.vision import build_vision
from megapack.job.hf.load import LoadedWeights, load_hf_weights
from megapack.job.train.metrics import training_metrics
from megapack.job.train.passes import BatchPasses, PlannedBatch, make_objective
from megapack.layout import Layout
from megapack.loss.sequence import ValueLoss
from megapack.model.head import unwrapped
from megapack.ranks.agree import agree
from megapack.ranks.links import Ranks
from megapack.schedule.adapter import ScheduleAdapter

_HEAD = "output_layer."


@dataclass(frozen=True, kw_only=True)
class Update:
    """What an optimizer step gave, the same on every rank but for seconds."""

    updated: bool
    """False if Megatron skipped the update."""
    seconds: float
    """Of forward, backward and update."""
    measured_s: float
    """Of forward and backward."""
    metrics: dict[str, Any]


class Learner:
    """One model of the run on one rank. The constructor is a collective of all ranks.

    Args:
        config: the run's, whose model has the kernel that ranks agreed on.
        layout: the resolved layout.
        policy: for a critic the policy's modules with their first weights, which become its own
            unless `critic.hf_path` has others; None: the policy itself.
        reduction: see `build_model`.
        device: see `agree`.

    Attributes:
        chunks: this rank's chunks.
        modules: the chunks, and the tower of a model with images.
        loaded: what the folder gave; None without it.
        optimizer: Megatron's, for these chunks.
        adapter: runs the chunks.
        passes: runs batches.
    """

    def __init__(
        self,
        config: TrainConfig,
        layout: Layout,
        *,
        policy: Sequence[Any] | None = None,
        reduction: Settings,
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        is_critic = policy is not None
        has_value_head = is_critic or config.objective.has_value_head
        if is_critic:
            model, hf_path, optim = config.critic_model, config.critic.hf_path, critic_optim(config)
        else:
            model, hf_path, optim = config.model, config.model.hf_path, config.optim
            model = model.with_value_head() if has_value_head else model
        has_same_layers = model.num_layers == config.model.num_layers
        self.chunks = build_model(
            model,
            layout,
            vocab_size=config.model.vocab_size or ByteTokenizer().vocab_size,
            seed=config.seed,
            distributed_optimizer=config.optim.distributed_optimizer,
            reduction=reduction,
            stage_layers=config.stage_layers if has_same_layers else None,
            # The policy's folder comes with the copy, and its value head begins with zeros.
            draws_weights=config.model.hf_path is None and hf_path is None,
            value_head=has_value_head,
            splits_backward=config.plan.backward == "split",
        )
        tower = None
        self.modules: list[Any] = list(self.chunks)
        # A model with a value head has no folder: its tower is built as the policy's.
        if config.model.vision != "off":
            distributed = config.optim.distributed_optimizer
            tower = build_vision(config.model, distributed_optimizer=distributed)
            self.modules.append(tower)
        # Before the optimizer and the reference copy the weights. A resumed run does so too: what
        # follows from the initial weights, such as the head's kernel, must be as it was.
        self.loaded: LoadedWeights | None = None
        if hf_path is not None:
            self.loaded = load_hf_weights(self.modules, hf_path, device=device)
        elif policy is not None:
            agree(lambda: copy_weights(policy, self.modules), device=device)
        self.optimizer = build_optimizer(optim, self.chunks, config.model.dtype == "bf16", tower)
        self.adapter = ScheduleAdapter(
            self.chunks,
            layout=layout,
            logprob_chunk_tokens=config.objective.logprob_chunk_tokens,
            head="value" if has_value_head else "vocabulary",
            executor=config.train.executor,
            vision=tower,
            ranks=ranks,
        )
        self.passes = BatchPasses(
            config=config.objective,
            adapter=self.adapter,
            optimizer=self.optimizer,
            objective=ValueLoss(clip=config.critic.clip)
            if is_critic
            else make_objective(config.objective),
            is_critic=is_critic,
            routing_replay="none" if is_critic else config.train.routing_replay,
            # A value head has no entropy.
            entropy_interval=0 if has_value_head else config.train.entropy_interval,
            device=device,
        )
        self._optim = optim
        self._ranks = ranks
        self._schedule: OptimizerParamScheduler | None = None

    def expect(self, total_steps: int, num_steps: int) -> None:
        """Set up the learning rate schedule of a run, of which some steps may have been taken."""
        self._schedule = build_lr_schedule(self._optim, self.optimizer, total_steps)
        self._schedule.step(increment=num_steps)

    def take_step(
        self,
        batch: PlannedBatch,
        index: int,
        *,
        name: str,
        num_steps: int,
        predicted_s: float | None,
    ) -> Update:
        """Take an optimizer step. A collective.

        Args:
            index, num_steps: see `BatchPasses.gradients`.
            name: of the step, for the watchdog.
            predicted_s: seconds that forward and backward should take, or None.
        """
        assert self._schedule is not None
        with self._ranks.guarded(name, predicted_s):
            result, measured_s = self.passes.gradients(batch, index, num_steps=num_steps)
            started = time.perf_counter()
            self._ranks.place.enter("optimizer")
            updated, grad_norm, _ = self.optimizer.step()
            check_norm(float(grad_norm))
        lr = self.optimizer.param_groups[0]["lr"]
        self._schedule.step(increment=1)
        optimizer_s = time.perf_counter() - started
        metrics = {
            **training_metrics(result),
            "grad_norm": float(grad_norm),
            "updated": int(updated),
            "lr": lr,
            "step_measured_s": measured_s,
            "optimizer_s": optimizer_s,
        }
        return Update(
            updated=bool(updated),
            seconds=measured_s + optimizer_s,
            measured_s=measured_s,
            metrics=metrics,
        )


def critic_optim(config: TrainConfig) -> OptimConfig:
    """The section `optim` with the critic's learning rate; the lowest rate changes with it."""
    optim = config.optim
    lr = config.critic.lr
    if lr is None:
        return optim
    min_lr = optim.min_lr * (lr / optim.lr) if optim.lr else 0.0
    return dataclasses.replace(optim, lr=lr, min_lr=min(min_lr, lr))


def copy_weights(policy: Sequence[Any], critic: Sequence[Any]) -> None:
    """Copy all of the policy's weights but the head into the critic's modules; local work.

    Both have the same layout, so parameters of one name in a module have the same shape. Expert
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
