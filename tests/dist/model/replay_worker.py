"""Runs the main job with routing replay, and compares each step with one sample at a time.

torchrun --nproc-per-node 2 -m tests.dist.model.replay_worker OUT CONFIG [OVERRIDE ...]

The judge is a stock model with Megatron's own replay of one sample's experts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megapack import launch
from megapack.config.load import load_config
from megapack.job.config.sections import TrainConfig
from megapack.job.train.job import Trainer
from megapack.job.train.passes import PlannedBatch
from megapack.model.parameters import global_parameters
from megapack.ranks.interrupt import Interrupt
from megapack.ranks.links import Ranks
from tests.dist.exactness import reference
from tests.dist.losses.critic_worker import Recorder, Weights, fill, relative_error, sample_tokens


def run(config: TrainConfig) -> dict[str, Any]:
    """Train one batch; returns what rank 0 found."""
    interrupt = Interrupt(saves=False)
    device = launch.start("cpu")
    ranks = Ranks.start(config.watchdog, ends_process=True, interrupt=interrupt)
    trainer = Trainer(config, device, interrupt, ranks)
    recorder = Recorder(trainer.chunks, trainer.policy.optimizer)
    trainer.run()
    batch = trainer._last
    assert batch is not None
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, batch.routing)
    routing = [next(v for v in values if v is not None) for values in zip(*of_ranks, strict=True)]
    if dist.get_rank() == 0:
        judge = Judge(config, batch, routing)
        shared = [row.shared_tokens for step in batch.plan.steps for row in step.microbatches]
        return {
            "is_scattered": None in of_ranks[0],
            "shared_tokens": sum(shared),
            **judge.check(recorder.steps),
        }
    return {}


class Judge:
    """One unpadded sample at a time, on stock models: one replays, one chooses its own experts."""

    def __init__(self, config: TrainConfig, batch: PlannedBatch, routing: list[Tensor]) -> None:
        self.config = config
        self.batch = batch
        self.tokens, self.masks = sample_tokens(config, batch.numbers.tolist())
        self.routing = [
            _whole(choices, tokens.numel())
            for choices, tokens in zip(routing, self.tokens, strict=True)
        ]
        self.replaying = reference.build(config.model)
        self.free = reference.build(config.model)

    def check(self, steps: list[tuple[Weights, Weights]]) -> dict[str, Any]:
        """Errors of log-probs, losses and gradients, and shares of tokens that change experts."""
        found: dict[str, Any] = {}
        samples = self.batch.samples
        fill(self.replaying, steps[0][0])
        with torch.no_grad():
            old = [self.logprobs(i) for i in range(len(self.tokens))]
        errors = [
            (samples.field("old_logprobs", i)[self.masks[i]] - own).abs().max()
            for i, own in enumerate(old)
        ]
        found["old_logprobs_error"] = float(torch.stack(errors).max())
        for index, (weights, grads) in enumerate(steps):
            kept = self.batch.plan.steps[index].kept_samples
            fill(self.replaying, weights)
            fill(self.free, weights)
            self.replaying.zero_grad()
            loss = torch.cat([self.loss(i, old[i]) for i in kept]).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            own = {name: _gradient(p) for name, p in global_parameters(self.replaying)}
            found[f"loss_{index}"] = float(loss)
            found[f"gradient_error_{index}"] = relative_error(grads, own)
            found[f"changed_{index}"] = self.changed(list(kept))
        return found

    def logprobs(self, i: int) -> Tensor:
        """Log-probs of a sample's loss tokens, with its replayed experts."""
        reference.replay(self.replaying, self.routing[i])
        logprobs = reference.logprobs_and_entropy(self.replaying, self.tokens[i], 1.0)[0]
        return logprobs[self.masks[i][1:]]

    def loss(self, i: int, old: Tensor) -> Tensor:
        objective = self.config.objective
        advantage = self.batch.samples.field("advantages", i)
        ratio = torch.exp(self.logprobs(i) - old)
        clipped = torch.clip(ratio, 1 - objective.clip_low, 1 + objective.clip_high)
        return -torch.min(ratio * advantage, clipped * advantage)

    def changed(self, kept: list[int]) -> float:
        """Share of tokens and layers at which free routers choose other experts."""
        parts = []
        for i in kept:
            routers = reference.Routers(self.free)
            with torch.no_grad():
                reference.logprobs_and_entropy(self.free, self.tokens[i], 1.0)
            routers.remove()
            for layer, chosen in enumerate(routers.chosen):
                replayed = torch.zeros_like(chosen).scatter(1, self.routing[i][:, layer], True)
                # An engine does not run the last token, and no later token reads it.
                parts.append((chosen != replayed).any(1)[:-1].float())
        return float(torch.cat(parts).mean())


def _whole(choices: Tensor, length: int) -> Tensor:
    """Choices of all tokens; experts 0, 1, ... for a last token that is missing."""
    rest = torch.arange(choices.shape[-1]).expand(length - len(choices), *choices.shape[1:])
    return torch.cat([choices.long(), rest])


def _gradient(param: Tensor) -> Tensor:
    return torch.zeros_like(param).double() if param.grad is None else param.grad.double()


def main(out: str, config: str, *overrides: str) -> None:
    """Run, and write what rank 0 found."""
    found = run(load_config(config, list(overrides), TrainConfig))
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found, indent=1), encoding="utf-8")
    dist.barrier()
    launch.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
