"""Plain loops beside the main job: the same objectives, one unpadded sample at a time.

Each runs the steps of `CASES` with a stock model and torch's Adam. Losses, advantages and penalties
are written as in their papers, a second time.

python -m tests.dist.losses.objectives_loop OUT
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapack import launch
from megapack.job.gpt import initialize_parallel
from megapack.layout import Layout
from megapack.samples import SampleBatch
from tests.dist import problem
from tests.dist.losses.sequence_reference import SequenceReference

BETA = 0.3
SMOOTHING = 0.1
MAX_RESPONSE = 12
BUFFER = 6
PENALTY = 0.8
CLIP_HIGH = 0.28
LR = 2e-3
# Large, so that rounding in small gradients does not decide the sign of an update.
ADAM_EPS = 1e-3
# Two batches of two steps each.
NUM_BATCHES = 2
PAIRS_PER_STEP = 3
GROUPS_PER_STEP = 2
GROUP_SIZE = 3
ENGINE_HIGH = 1.3
TEACHER_COEF = 0.4
TOPK = 5
REVERSE = 0.25
DISTILL_STEP = 3 * GROUPS_PER_STEP * GROUP_SIZE // 2


def pairs() -> list[dict[str, Any]]:
    """Lines of a preference file, in the order of training."""
    rng = random.Random(5)
    return [
        {
            "prompt_ids": _ids(rng, 1, 6),
            "chosen_ids": _ids(rng, 1, 14),
            "rejected_ids": _ids(rng, 1, 14),
        }
        for _ in range(2 * NUM_BATCHES * PAIRS_PER_STEP)
    ]


def rollouts() -> list[dict[str, Any]]:
    """Lines of rollouts; every third prompt group has equal rewards."""
    rng = random.Random(6)
    rows = []
    for group in range(3 * NUM_BATCHES * GROUPS_PER_STEP):
        prompt = _ids(rng, 1, 6)
        rewards = (
            [1.0] * GROUP_SIZE if group % 3 == 1 else [rng.random() for _ in range(GROUP_SIZE)]
        )
        rows += [
            {
                "group": group,
                "prompt_ids": prompt,
                "response_ids": _ids(rng, 1, 16),
                "reward": reward,
            }
            for reward in rewards
        ]
    return rows


def rollouts_with_columns() -> list[dict[str, Any]]:
    """The rollouts, with log-probs of an engine and of a teacher."""
    rng = random.Random(7)
    mean = -math.log(problem.VOCAB_SIZE)
    rows = []
    for row in rollouts():
        size = len(row["response_ids"])
        topk = [[-rng.uniform(0.5, 4.0) - math.log(TOPK) for _ in range(TOPK)] for _ in range(size)]
        columns = {
            "rollout_logprobs": [rng.gauss(mean, 0.3) for _ in range(size)],
            "teacher_logprobs": [rng.gauss(mean, 0.5) for _ in range(size)],
            "teacher_topk_ids": [rng.sample(range(problem.VOCAB_SIZE), TOPK) for _ in range(size)],
            "teacher_topk_logprobs": topk,
        }
        rows.append({**row, **columns})
    return rows


def _ids(rng: random.Random, least: int, most: int) -> list[int]:
    return [rng.randrange(problem.VOCAB_SIZE) for _ in range(rng.randint(least, most))]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run of the main job, and the loop that it must equal."""

    rows: Callable[[], list[dict[str, Any]]]
    layout: Layout
    overrides: tuple[str, ...]
    value_head: bool = False


_PAIRS = ("objective.loss_weighting=seq-mean-token-mean",)
_PAIRS += (f"data.prompts_per_batch={2 * PAIRS_PER_STEP}",)
_PAIRS += (f"plan.global_batch_size={PAIRS_PER_STEP}",)

CASES = {
    "dpo": Case(
        rows=pairs,
        layout=Layout(dp=2, pp=2),
        overrides=(
            *_PAIRS,
            "objective.kind=dpo",
            f"objective.dpo_beta={BETA}",
            f"objective.dpo_label_smoothing={SMOOTHING}",
        ),
    ),
    "reward": Case(
        rows=pairs,
        layout=Layout(pp=2),
        overrides=(*_PAIRS, "objective.kind=reward"),
        value_head=True,
    ),
    "dapo": Case(
        rows=rollouts,
        layout=Layout(dp=2),
        overrides=(
            "data.drop_equal_rewards=true",
            f"data.prompts_per_batch={2 * GROUPS_PER_STEP}",
            f"plan.global_batch_size={GROUPS_PER_STEP * GROUP_SIZE}",
            "objective.kind=grpo",
            "objective.advantage_norm=rloo",
            f"objective.clip_high={CLIP_HIGH}",
            f"objective.max_response_tokens={MAX_RESPONSE}",
            f"objective.overlong_buffer_tokens={BUFFER}",
            f"objective.overlong_penalty={PENALTY}",
        ),
    ),
    "tis": Case(
        rows=rollouts_with_columns,
        layout=Layout(dp=2),
        overrides=(
            "data.drop_equal_rewards=true",
            f"data.prompts_per_batch={2 * GROUPS_PER_STEP}",
            f"plan.global_batch_size={GROUPS_PER_STEP * GROUP_SIZE}",
            "objective.advantage_norm=rloo",
            "objective.correction=truncate",
            "objective.correction_level=sequence",
            f"objective.correction_high={ENGINE_HIGH}",
            f"objective.teacher_kl_coef={TEACHER_COEF}",
        ),
    ),
    "distill": Case(
        rows=rollouts_with_columns,
        layout=Layout(dp=2, pp=2),
        overrides=(
            f"data.prompts_per_batch={3 * GROUPS_PER_STEP}",
            f"plan.global_batch_size={DISTILL_STEP}",
            "objective.kind=distill",
            f"objective.distill_reverse_weight={REVERSE}",
        ),
    ),
}


class Loop:
    """A model, its samples, and Adam."""

    def __init__(self, samples: list[tuple[list[int], list[int]]], value_head: bool) -> None:
        self.reference = SequenceReference(value_head)
        self.reference.batch = SampleBatch.from_prompt_response(*zip(*samples, strict=True))
        params = self.reference.model.parameters()
        self.adam = torch.optim.Adam(params, lr=LR, betas=(0.9, 0.95), eps=ADAM_EPS)

    def logprobs(self, sample: int) -> Tensor:
        return self.reference.logprobs(sample)[0]

    def score(self, sample: int) -> Tensor:
        return self.reference.values(sample)[-1]

    def fixed_logprobs(self, samples: Any) -> dict[int, Tensor]:
        """Log-probs under the weights of now."""
        with torch.no_grad():
            return {sample: self.logprobs(sample) for sample in samples}

    def step(self, loss: Tensor) -> dict[str, float]:
        self.adam.zero_grad()
        loss.backward()
        params = [p for p in self.reference.model.parameters() if p.grad is not None]
        norm = torch.stack([p.grad.square().sum() for p in params if p.grad is not None]).sum()
        self.adam.step()
        return {"loss": float(loss.detach()), "grad_norm": float(norm.sqrt())}


def run_dpo() -> list[dict[str, float]]:
    rows = pairs()
    loop = Loop(_samples_of_pairs(rows), value_head=False)
    reference = loop.fixed_logprobs(range(2 * len(rows)))
    steps = []
    for first in range(0, len(rows), PAIRS_PER_STEP):
        losses = []
        margins = []
        for pair in range(first, first + PAIRS_PER_STEP):
            won, lost = ((loop.logprobs(i) - reference[i]).sum() for i in (2 * pair, 2 * pair + 1))
            p = torch.sigmoid(BETA * (won - lost))
            losses.append(-(1 - SMOOTHING) * p.log() - SMOOTHING * (1 - p).log())
            margins.append(float((won - lost).detach()))
        result = loop.step(torch.stack(losses).mean())
        steps.append({**result, "margin": sum(margins) / len(margins)})
    return steps


def run_reward() -> list[dict[str, float]]:
    rows = pairs()
    loop = Loop(_samples_of_pairs(rows), value_head=True)
    steps = []
    for first in range(0, len(rows), PAIRS_PER_STEP):
        chosen = [loop.score(2 * pair) for pair in range(first, first + PAIRS_PER_STEP)]
        other = [loop.score(2 * pair + 1) for pair in range(first, first + PAIRS_PER_STEP)]
        margin = torch.stack(chosen) - torch.stack(other)
        means = {
            "margin": float(margin.mean().detach()),
            "preferred_reward": float(torch.stack(chosen).mean().detach()),
            "other_reward": float(torch.stack(other).mean().detach()),
        }
        steps.append({**loop.step(-torch.sigmoid(margin).log().mean()), **means})
    return steps


def run_dapo() -> list[dict[str, float]]:
    rows = rollouts()
    groups = [list(range(k, k + GROUP_SIZE)) for k in range(0, len(rows), GROUP_SIZE)]
    kept = [group for group in groups if len({rows[i]["reward"] for i in group}) > 1]
    advantages = {}
    for group in kept:
        rewards = {i: rows[i]["reward"] - _penalty(len(rows[i]["response_ids"])) for i in group}
        for i in group:
            others = [rewards[j] for j in group if j != i]
            advantages[i] = rewards[i] - sum(others) / len(others)
    loop = Loop([(row["prompt_ids"], row["response_ids"]) for row in rows], value_head=False)
    steps = []
    for first in range(0, len(kept), 2 * GROUPS_PER_STEP):
        batch = kept[first : first + 2 * GROUPS_PER_STEP]
        old = loop.fixed_logprobs(i for group in batch for i in group)
        for start in range(0, len(batch), GROUPS_PER_STEP):
            losses = []
            for i in (i for group in batch[start : start + GROUPS_PER_STEP] for i in group):
                ratio = torch.exp(loop.logprobs(i) - old[i])
                clipped = torch.clip(ratio, 0.8, 1 + CLIP_HIGH)
                losses.append(-torch.min(ratio * advantages[i], clipped * advantages[i]))
            steps.append(loop.step(torch.cat(losses).mean()))
    return steps


def run_tis() -> list[dict[str, float]]:
    rows = rollouts_with_columns()
    groups = [list(range(k, k + GROUP_SIZE)) for k in range(0, len(rows), GROUP_SIZE)]
    kept = [group for group in groups if len({rows[i]["reward"] for i in group}) > 1]
    advantages = {}
    for group in kept:
        for i in group:
            others = [rows[j]["reward"] for j in group if j != i]
            advantages[i] = rows[i]["reward"] - sum(others) / len(others)
    loop = Loop([(row["prompt_ids"], row["response_ids"]) for row in rows], value_head=False)
    steps = []
    for first in range(0, len(kept), 2 * GROUPS_PER_STEP):
        batch = kept[first : first + 2 * GROUPS_PER_STEP]
        old = loop.fixed_logprobs(i for group in batch for i in group)
        for start in range(0, len(batch), GROUPS_PER_STEP):
            losses = []
            ratios = []
            for i in (i for group in batch[start : start + GROUPS_PER_STEP] for i in group):
                engine = torch.tensor(rows[i]["rollout_logprobs"])
                own = old[i] - torch.tensor(rows[i]["teacher_logprobs"])
                own = advantages[i] - TEACHER_COEF * own
                ratio = torch.exp(loop.logprobs(i) - old[i])
                product = torch.exp(old[i] - engine).prod()
                policy = -torch.min(ratio * own, torch.clip(ratio, 0.8, 1.2) * own)
                losses.append(torch.clip(product, max=ENGINE_HIGH) * policy)
                ratios.append(product.expand(len(policy)))
            token_ratios = torch.cat(ratios)
            metrics = {
                "engine_ratio": float(token_ratios.mean()),
                "engine_ratio_max": float(token_ratios.max()),
                "engine_clip_fraction": float((token_ratios > ENGINE_HIGH).float().mean()),
            }
            steps.append({**loop.step(torch.cat(losses).mean()), **metrics})
    return steps


def run_distill() -> list[dict[str, float]]:
    rows = rollouts_with_columns()
    loop = Loop([(row["prompt_ids"], row["response_ids"]) for row in rows], value_head=False)
    for name in ("teacher_topk_ids", "teacher_topk_logprobs"):
        loop.reference.batch.set_field(name, [row[name] for row in rows])
    steps = []
    for first in range(0, len(rows), DISTILL_STEP):
        forward = []
        reverse = []
        for i in range(first, first + DISTILL_STEP):
            _, model, teacher = loop.reference.distributions(i)
            p, q = (
                torch.cat([x.exp(), 1 - x.exp().sum(1, keepdim=True)], 1) for x in (teacher, model)
            )
            forward.append((p * (p / q).log()).sum(1))
            reverse.append((q * (q / p).log()).sum(1))
        means = [torch.cat(each).mean() for each in (forward, reverse)]
        loss = (1 - REVERSE) * means[0] + REVERSE * means[1]
        names = ("kl_forward_nats", "kl_reverse_nats")
        found = {name: float(mean.detach()) for name, mean in zip(names, means, strict=True)}
        steps.append({**loop.step(loss), **found})
    return steps


def _penalty(tokens: int) -> float:
    if tokens <= MAX_RESPONSE - BUFFER:
        return 0.0
    return PENALTY * min(1.0, (tokens - (MAX_RESPONSE - BUFFER)) / BUFFER)


def _samples_of_pairs(rows: list[dict[str, Any]]) -> list[tuple[list[int], list[int]]]:
    return [(row["prompt_ids"], row[key]) for row in rows for key in ("chosen_ids", "rejected_ids")]


def main(out: str) -> None:
    """Write the steps of every loop."""
    launch.start("cpu")
    initialize_parallel(Layout(), problem.SEED)
    results = {name: globals()[f"run_{name}"]() for name in CASES}
    Path(out).write_text(json.dumps(results), encoding="utf-8")
    launch.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
