"""Expected results of a step, added up from the reference's samples as each weighting defines."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megapack.plan import Plan
from tests.dist import problem
from tests.dist.exactness.cases import Case


def expected_step(
    case: Case, plan: Plan, samples: list[dict[str, Any]]
) -> tuple[float, dict[str, Tensor]]:
    """The loss and the unsliced gradients of the samples that the plan keeps."""
    kept = [i for i in plan.steps[0].kept_samples if samples[i]["num_tokens"] > 0]
    loss = 0.0
    grads: dict[str, Tensor] = {}
    for i in kept:
        weight = _weight(case, samples, kept, i)
        loss += weight * samples[i]["loss"]
        for name, grad in samples[i]["grads"].items():
            grads[name] = grads.get(name, torch.zeros_like(grad)) + weight * grad
    for name, grad in auxiliary_gradients(plan, samples).items():
        # The loss of an indexer is all that reaches it.
        grads[name] = grads.get(name, torch.zeros_like(grad)) + grad
    return loss, grads


def expected_mtp(case: Case, plan: Plan, samples: list[dict[str, Any]]) -> dict[str, float]:
    """The weighted loss of each depth of multi-token prediction."""
    kept = [i for i in plan.steps[0].kept_samples if samples[i]["num_tokens"] > 0]
    losses: dict[str, float] = {}
    for i in kept:
        for depth, loss in enumerate(samples[i]["mtp_losses"], start=1):
            name = f"mtp_{depth}_loss"
            losses[name] = losses.get(name, 0.0) + _weight(case, samples, kept, i) * loss
    return losses


def auxiliary_gradients(plan: Plan, samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Gradients of the losses of experts and indexers, means over all real tokens; {} without."""
    grads: dict[str, Tensor] = {}
    for sample in _with_losses(plan, samples):
        for name, grad in sample["grads"].items():
            grads[name] = grads.get(name, torch.zeros_like(grad)) + grad / _tokens(plan, samples)
    return grads


def auxiliary_metrics(plan: Plan, samples: list[dict[str, Any]]) -> dict[str, float]:
    """The losses of experts and indexers that the step must report."""
    own = _with_losses(plan, samples)
    names = ("moe_balance_loss", "moe_z_loss", "indexer_loss")
    return {
        name: sum(sample[name] for sample in own) / _tokens(plan, samples)
        for name in names
        if name in own[0]
    }


def tokens_per_expert(plan: Plan, samples: list[dict[str, Any]]) -> Tensor:
    """How many real tokens chose each expert: [layers, experts]."""
    return sum(sample["chosen"].sum(0) for sample in _with_losses(plan, samples))


def _with_losses(plan: Plan, samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        samples[i]["auxiliary"] for i in plan.steps[0].kept_samples if "auxiliary" in samples[i]
    ]


def _tokens(plan: Plan, samples: list[dict[str, Any]]) -> int:
    return sum(sample["num_tokens"] for sample in _with_losses(plan, samples))


def _weight(case: Case, samples: list[dict[str, Any]], kept: list[int], index: int) -> float:
    tokens = {i: samples[i]["num_tokens"] for i in kept}
    if case.weighting == "token-mean":
        return 1 / sum(tokens.values())
    if case.weighting == "seq-mean-token-mean":
        return 1 / len(kept) / tokens[index]
    if case.weighting == "seq-mean-token-sum":
        return 1 / len(kept)
    if case.weighting == "seq-mean-token-sum-norm":
        assert case.norm_constant is not None
        return 1 / len(kept) / case.norm_constant
    assert case.weighting == "rollout-mean"
    ids = problem.ROLLOUT_IDS
    rollouts = {ids[i] for i in kept}
    rollout_tokens = sum(tokens[i] for i in kept if ids[i] == ids[index])
    return 1 / len(rollouts) / rollout_tokens
