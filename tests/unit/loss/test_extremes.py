"""Objectives at log-probs that are far apart, against the formulas in Python's numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megapack.loss import (
    DPO,
    GRPO,
    GSPO,
    PPO,
    SFT,
    Correction,
    Distillation,
    PairwiseReward,
    ValueLoss,
)
from megapack.loss.sequence import call_objective
from megapack.rows.segments import Segments

pytestmark = pytest.mark.unit

FP32 = torch.finfo(torch.float32).max
SHIFTS = (-1e30, -1e4, -100.0, -20.0, -0.1, 0.0, 0.3, 20.0, 80.0, 88.6, 90.0, 100.0, 1e4, 1e30)
ADVANTAGES = (-1.0, -1e-3, 0.0, 1.0)


def exp(x: float) -> float:
    return math.exp(x) if x < 709 else math.inf


def clipped(ratio: float, advantage: float, low: float, high: float, dual: float) -> Any:
    """A token's loss and its derivative by the log-ratio."""
    if advantage >= 0:
        bounded, is_free = min(ratio, 1 + high), ratio <= 1 + high
    else:
        bounded = min(max(ratio, 1 - low), dual)
        is_free = 1 - low <= ratio <= dual
    if advantage == 0:
        return 0.0, 0.0
    return -advantage * bounded, -advantage * ratio if is_free else 0.0


def k3(x: float) -> tuple[float, float]:
    return exp(-x) - 1 + x, 1 - exp(-x)


def compare(found: Tensor, expected: list[float], *, rtol: float = 1e-5) -> None:
    """Equal where fp32 has the number, and infinite where it does not."""
    for one, other in zip(found.double().tolist(), expected, strict=True):
        if abs(other) > FP32:
            assert math.isinf(one), (one, other)
        else:
            assert one == pytest.approx(other, rel=rtol, abs=1e-6), (one, other)


def run(
    objective: Any, values: Tensor, fields: dict[str, Tensor], segments: Segments
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Losses, metrics, and the gradient of the losses that are finite; 0 at the others."""
    values = values.clone().requires_grad_()
    losses, metrics = call_objective(objective, values, None, fields, segments)
    assert losses.dtype == torch.float32
    torch.where(losses.isfinite(), losses, 0.0).sum().backward()  # type: ignore[no-untyped-call]
    assert values.grad is not None
    has_value = losses.detach().isfinite()
    return losses.detach(), metrics, torch.where(has_value, values.grad.t(), 0.0).t()


def alone(count: int, **fields: Tensor) -> Segments:
    """Each position a sample of its own."""
    return Segments(sample_of_R=torch.arange(count), set_of_n=torch.arange(count), fields=fields)


@pytest.mark.parametrize("kind", [PPO, GRPO, GSPO])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"clip_low": 0.1, "clip_high": 0.28},
        {"dual_clip": 3.0},
        {"clip_low": 1.0, "clip_high": 1e5, "dual_clip": 1e30},
        {"correction": Correction(high=1.5)},
        {"correction": Correction(kind="mask", low=0.5)},
    ],
    ids=lambda one: "-".join(map(str, one)),
)
def test_policy_losses(kind: Any, settings: dict[str, Any]) -> None:
    cases = list(itertools.product(SHIFTS, ADVANTAGES))
    shifts, advantages = torch.tensor(cases).unbind(1)
    new = torch.full_like(shifts, -2.0)
    fields = {"advantages": advantages, "old_logprobs": new - shifts}
    # Every second engine's log-prob is far above the trainer's: a weight near 0, or 0.
    far = torch.arange(len(cases)) % 2 == 0
    fields["rollout_logprobs"] = fields["old_logprobs"] + torch.where(far, 1e3, 0.2)
    own = {"clip_low": 0.2, "clip_high": 0.2} | settings
    losses, metrics, gradient = run(kind(**own), new, fields, alone(len(cases)))
    weights = torch.ones(len(cases)).double()
    if "correction" in own:
        weights = own["correction"].weights(fields, alone(len(cases)))[0].double()
    values, slopes = [], []
    for x, advantage, weight in zip(
        (new.double() - fields["old_logprobs"]).tolist(), advantages.tolist(), weights, strict=True
    ):
        bound = own.get("dual_clip", math.inf)
        value, slope = clipped(exp(x), advantage, own["clip_low"], own["clip_high"], bound)
        values.append(float(weight) * value if weight else 0.0)
        slopes.append(float(weight) * slope if weight and abs(values[-1]) <= FP32 else 0.0)
    compare(losses, values)
    compare(gradient, slopes)
    assert all(one.isfinite().all() for one in metrics.values())


@pytest.mark.parametrize("coef", [1.0, 1e-3])
@pytest.mark.parametrize("kind", [GRPO, GSPO])
@pytest.mark.parametrize(
    ("kl", "formula"),
    [("k1", lambda x: (x, 1.0)), ("k2", lambda x: (x * x / 2, x)), ("k3", k3)],
)
def test_divergences_from_a_reference(
    kind: Any, kl: Any, formula: Callable[[float], tuple[float, float]], coef: float
) -> None:
    new = torch.full((len(SHIFTS),), -2.0)
    reference = new - torch.tensor(SHIFTS)
    fields = {"advantages": torch.zeros_like(new), "old_logprobs": new, "ref_logprobs": reference}
    own = kind(kl_coef=coef, kl_kind=kl)
    losses, metrics, gradient = run(own, new, fields, alone(len(SHIFTS)))
    found = [formula(x) for x in (new.double() - reference).tolist()]
    compare(losses, [coef * value for value, _ in found])
    compare(
        gradient, [coef * slope if abs(coef * value) <= FP32 else 0.0 for value, slope in found]
    )
    has_value = losses.isfinite()
    assert all(one[has_value].isfinite().all() for one in metrics.values())


def test_the_mean_log_ratio_of_a_sample_decides() -> None:
    """A token 300 nats off in a sample of three is a mean of 100; the other sample is near 1."""
    new = torch.tensor([-1.0, -1.0, -1.0, -2.0, -2.0])
    old = torch.tensor([-301.0, -1.0, -1.0, -2.1, -1.9])
    row = Segments(sample_of_R=torch.tensor([0, 0, 0, 1, 1]), set_of_n=torch.tensor([0, 1]))
    for token_level, advantage in itertools.product((False, True), (1.0, 0.0)):
        fields = {"advantages": torch.full((5,), advantage), "old_logprobs": old}
        objective = GSPO(clip_high=0.5, token_level=token_level)
        losses, metrics, gradient = run(objective, new, fields, row)
        compare(losses, [-1.5 * advantage] * 3 + [-advantage] * 2)
        # Both of its tokens have the gradient of half the mean, twice, or each its own.
        compare(gradient, [0.0] * 3 + [-advantage] * 2)
        assert all(one.isfinite().all() for one in metrics.values())


@pytest.mark.parametrize("margin", [-1e30, -1e4, -200.0, 0.0, 200.0, 1e4, 1e30])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_pairs(margin: float, smoothing: float) -> None:
    new = torch.tensor([-3.0, -5.0])
    row = Segments(
        sample_of_R=torch.tensor([0, 1]),
        set_of_n=torch.zeros(2, dtype=torch.int64),
        fields={"pair_sign": torch.tensor([1.0, -1.0])},
    )
    reference = torch.tensor([-3.0 - margin, -5.0])
    objective = DPO(beta=1.0, label_smoothing=smoothing)
    losses, metrics, gradient = run(objective, new, {"ref_logprobs": reference}, row)

    def softplus(x: float) -> float:
        return max(x, 0.0) + math.log1p(exp(-abs(x)))

    exact = float(torch.tensor(-3.0).double() - reference[0])
    value = (1 - smoothing) * softplus(-exact) + smoothing * softplus(exact)
    compare(losses, [value] * 2)
    # Both tokens have the loss of the pair.
    slope = 2 * (smoothing - 1 / (1 + exp(exact)) if exact < 700 else smoothing)
    compare(gradient, [slope, -slope])
    assert all(one.isfinite().all() for one in metrics.values())
    assert metrics["preferred_fraction"].tolist() == [float(margin > 0)] * 2


@pytest.mark.parametrize("scale", [-1e4, 0.0, 1e4, 1e30])
def test_scores_of_a_pair(scale: float) -> None:
    scores = torch.tensor([scale, 0.0], requires_grad=True)
    row = Segments(
        sample_of_R=torch.tensor([0, 1]),
        set_of_n=torch.zeros(2, dtype=torch.int64),
        fields={"pair_sign": torch.tensor([1.0, -1.0])},
        scores_n=scores,
    )
    losses, metrics = call_objective(PairwiseReward(), torch.zeros(2), None, {}, row)
    (gradient,) = torch.autograd.grad(losses.sum(), scores)
    compare(losses, [max(-scale, 0.0) if scale else math.log(2)] * 2)
    assert gradient.isfinite().all()
    assert all(one.isfinite().all() for one in metrics.values())


def test_a_margin_of_rounding_is_no_preference() -> None:
    """The first step of DPO, where policy and reference are one model in other rows."""
    row = Segments(
        sample_of_R=torch.arange(6),
        set_of_n=torch.arange(6) // 2,
        fields={"pair_sign": torch.tensor([1.0, -1.0] * 3)},
    )
    reference = torch.full((6,), -7.0)
    noise = torch.tensor([2e-6, 0.0, -2e-6, 0.0, 1e-2, 0.0])
    _, metrics = call_objective(DPO(), reference + noise, None, {"ref_logprobs": reference}, row)
    assert metrics["preferred_fraction"].tolist() == [0.0] * 4 + [1.0] * 2


@pytest.mark.parametrize("clip", [None, 0.2])
def test_values_far_from_their_returns(clip: float | None) -> None:
    values = torch.tensor([1e4, -1e15, 1e19, 2.2e19, 1e25])
    fields = {"returns": torch.zeros(5), "old_values": torch.zeros(5)}
    losses, metrics, gradient = run(ValueLoss(clip=clip), values, fields, alone(5))
    exact = values.double().tolist()
    compare(losses, [value**2 / 2 for value in exact])
    compare(gradient, [value if value**2 / 2 <= FP32 else 0.0 for value in exact])
    assert all(one.isfinite().all() for one in metrics.values())


@pytest.mark.parametrize("tail", ["lump", "ignore", "renormalize"])
@pytest.mark.parametrize("reverse", [0.0, 0.5, 1.0])
def test_distributions_that_know_of_different_ids(tail: Any, reverse: float) -> None:
    """-9999 is what engines write for a probability of 0."""
    low = -9999.0
    model = torch.tensor([[-1.0, 0.0, low], [-1.0, low, 0.0], [low, low, low], [-1.0, -1e4, -90.0]])
    teacher = torch.tensor([[low, 0.0], [low, 0.0], [0.0, low], [-90.0, low]])
    fields = {"teacher_topk_ids": torch.zeros(4, 2), "teacher_topk_logprobs": teacher}
    objective = Distillation(reverse_weight=reverse, tail=tail, sft_coef=0.5)
    losses, metrics, gradient = run(objective, model, fields, alone(4))
    assert losses.isfinite().all()
    assert gradient.isfinite().all()
    assert all(one.isfinite().all() for one in metrics.values())


def test_a_token_without_probability_has_a_finite_likelihood() -> None:
    losses, _, gradient = run(SFT(), torch.tensor([-1e30, 0.0]), {}, alone(2))
    compare(losses, [1e30, 0.0])
    compare(gradient, [-1.0, -1.0])
