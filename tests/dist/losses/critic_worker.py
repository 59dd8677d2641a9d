"""Runs the main job with a critic, and compares each step with one sample at a time.

torchrun --nproc-per-node 2 -m tests.dist.losses.critic_worker OUT CONFIG [OVERRIDE ...]

Before each update of policy and critic, their weights and gradients are kept. Afterwards rank 0
gives the same weights to stock models, and writes GAE and both losses a second time, with loops.
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
from megapack.job.config.critic import critic_model
from megapack.job.config.sections import TrainConfig
from megapack.job.data.batches import open_dataset
from megapack.job.train.job import Trainer
from megapack.model.parameters import global_parameters
from megapack.ranks.interrupt import Interrupt
from megapack.ranks.links import Ranks
from tests.dist.exactness import reference
from tests.dist.losses.sequence_reference import Score

Weights = dict[str, Tensor]


class Recorder:
    """Keeps the weights and gradients with which an optimizer is called."""

    def __init__(self, chunks: list[Any], optimizer: Any) -> None:
        self.steps: list[tuple[Weights, Weights]] = []
        self._chunks = chunks
        self._step = optimizer.step
        optimizer.step = self.step

    def step(self) -> Any:
        named = [pair for chunk in self._chunks for pair in global_parameters(chunk)]
        weights = {name: param.detach().clone() for name, param in named}
        self.steps.append((weights, {name: p.main_grad.double().clone() for name, p in named}))
        return self._step()


def run(config: TrainConfig) -> dict[str, Any]:
    """Train; returns the largest errors of every kind over all steps."""
    interrupt = Interrupt(saves=False)
    device = launch.start("cpu")
    ranks = Ranks.start(config.watchdog, ends_process=True, interrupt=interrupt)
    trainer = Trainer(config, device, interrupt, ranks)
    assert trainer.critic is not None
    recorders = [
        Recorder(trainer.chunks, trainer.policy.optimizer),
        Recorder(trainer.critic.chunks, trainer.critic.optimizer),
    ]
    trainer.run()
    batch = trainer._last
    assert batch is not None
    found: dict[str, Any] = {}
    if dist.get_rank() == 0:
        judge = Judge(config, batch.numbers.tolist())
        policy, critic = (recorder.steps for recorder in recorders)
        warmup = config.critic.warmup_steps
        assert len(policy) == len(batch.plan.steps) - warmup
        found = judge.fields(batch.samples, policy[0][0], critic[0][0])
        policy = [*[None] * warmup, *policy]
        for index, step in enumerate(batch.plan.steps):
            for name, recorded, loss in (
                ("policy", policy[index], judge.policy_loss),
                ("critic", critic[index], judge.value_loss),
            ):
                if recorded is None:
                    continue
                weights, grads = recorded
                value, error = judge.step(weights, grads, loss, list(step.kept_samples))
                found[f"{name}_loss_{index}"] = value
                found[f"{name}_gradient_error_{index}"] = error
    dist.barrier()
    return found


class Judge:
    """One unpadded sample at a time, on stock models.

    Args:
        numbers: of the batch's samples in the data set.
    """

    def __init__(self, config: TrainConfig, numbers: list[int]) -> None:
        self.config = config
        data = open_dataset(config)
        self.tokens, self.masks = sample_tokens(config, numbers)
        self.rewards = [data.rewards(numbers)[i].reward for i in range(len(numbers))]  # type: ignore[arg-type]
        self.policy = reference.build(config.model)
        model = critic_model(config.model, config.critic.hf_path)
        self.critic = reference.build(model)
        self.critic.output_layer = Score(model.hidden_size, 1, bias=False)
        self.first: list[dict[str, Tensor]] = []

    def fields(self, samples: Any, policy: Weights, critic: Weights) -> dict[str, Any]:
        """Log-probs, values, advantages and returns of the first weights; errors of the job's, the
        values, and the job's log-probs of the reference."""
        fill(self.policy, policy)
        fill(self.critic, critic)
        with torch.no_grad():
            for i in range(len(self.tokens)):
                self.first.append({"old_logprobs": self.logprobs(i), "old_values": self.values(i)})
        if self.config.objective.kl_in_reward_coef:
            for i, own in enumerate(self.first):
                own["ref_logprobs"] = samples.field("ref_logprobs", i)[self.masks[i]]
        self._advantages()
        worst = dict.fromkeys(("old_logprobs", "old_values", "advantages", "returns"), 0.0)
        for i, expected in enumerate(self.first):
            for name in worst:
                own = samples.field(name, i)[self.masks[i]]
                worst[name] = max(worst[name], float((own - expected[name]).abs().max()))
        errors: dict[str, Any] = {f"{name}_error": error for name, error in worst.items()}
        for name in ("ref_logprobs", "old_values"):
            errors[name] = [own[name].tolist() for own in self.first if name in own]
        return errors

    def _advantages(self) -> None:
        """GAE by its recursion, then whitening over all tokens of the batch."""
        objective = self.config.objective
        for i, own in enumerate(self.first):
            values = own["old_values"].tolist()
            after = 0.0
            value_after = 0.0
            advantages = []
            for t in reversed(range(len(values))):
                reward = self.rewards[i] if t == len(values) - 1 else 0.0
                if "ref_logprobs" in own:
                    log_ratio = own["old_logprobs"][t] - own["ref_logprobs"][t]
                    reward -= objective.kl_in_reward_coef * float(log_ratio)
                delta = reward + objective.gamma * value_after - values[t]
                after = delta + objective.gamma * objective.gae_lambda * after
                value_after = values[t]
                advantages.insert(0, after)
            own["advantages"] = torch.tensor(advantages)
            own["returns"] = own["advantages"] + own["old_values"]
        everything = torch.cat([own["advantages"] for own in self.first])
        for own in self.first:
            own["advantages"] = (own["advantages"] - everything.mean()) / everything.std()

    def step(
        self, weights: Weights, grads: Weights, loss: Any, kept: list[int]
    ) -> tuple[float, float]:
        """The loss of a step with these weights, and the relative error of its gradients."""
        model = self.critic if loss == self.value_loss else self.policy
        fill(model, weights)
        model.zero_grad()
        total = torch.cat([loss(i) for i in kept]).mean()
        total.backward()  # type: ignore[no-untyped-call]
        own = {name: p.grad.double() for name, p in global_parameters(model)}
        assert own.keys() == grads.keys()
        return float(total), relative_error(grads, own)

    def policy_loss(self, i: int) -> Tensor:
        first = self.first[i]
        objective = self.config.objective
        ratio = torch.exp(self.logprobs(i) - first["old_logprobs"])
        clipped = torch.clip(ratio, 1 - objective.clip_low, 1 + objective.clip_high)
        return -torch.min(ratio * first["advantages"], clipped * first["advantages"])

    def value_loss(self, i: int) -> Tensor:
        first = self.first[i]
        value = self.values(i)
        clip = self.config.critic.clip
        old = first["old_values"]
        clipped = torch.max(torch.min(value, old + clip), old - clip)
        target = first["returns"]
        return torch.max((value - target) ** 2, (clipped - target) ** 2) / 2

    def logprobs(self, i: int) -> Tensor:
        """Log-probs of the loss tokens."""
        logprobs = reference.logprobs_and_entropy(self.policy, self.tokens[i], 1.0)[0]
        return logprobs[self.masks[i][1:]]

    def values(self, i: int) -> Tensor:
        """The values of the states in which the loss tokens are chosen."""
        tokens = self.tokens[i]
        length = tokens.numel()
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
        values: Tensor = self.critic(tokens[None], torch.arange(length)[None], mask)[0, :, 0]
        return values[:-1][self.masks[i][1:]]


def relative_error(found: Weights, expected: Weights) -> float:
    """The norm of the difference over the norm of what is expected."""
    error = torch.stack([(found[name] - want).norm() for name, want in expected.items()]).norm()
    return float(error / torch.stack([want.norm() for want in expected.values()]).norm())


def sample_tokens(config: TrainConfig, numbers: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Token ids of samples of the data, and which of them count in the loss."""
    data = open_dataset(config)
    read = [data.tokens(number) for number in numbers]
    tokens = [torch.tensor([*one.prompt_ids, *one.response_ids]) for one in read]
    return tokens, [_mask(one) for one in read]


def _mask(tokens: Any) -> Tensor:
    """Which tokens of a sample count in the loss."""
    counts = [1] * len(tokens.response_ids) if tokens.loss_mask is None else tokens.loss_mask
    return torch.tensor([0] * len(tokens.prompt_ids) + [int(one) for one in counts]).bool()


def fill(model: Any, weights: Weights) -> None:
    """Give a stock model the weights of these names in the whole model."""
    with torch.no_grad():
        for name, param in global_parameters(model):
            param.copy_(weights[name])


def main(out: str, config: str, *overrides: str) -> None:
    """Run, and write the errors on rank 0."""
    found = run(load_config(config, list(overrides), TrainConfig))
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found, indent=1), encoding="utf-8")
    launch.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
