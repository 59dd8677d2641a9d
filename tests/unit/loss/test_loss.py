"""Weightings against hand-computed numbers and plain definitions; objectives against formulas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megapack.errors import ConfigError
from megapack.layout import Layout
from megapack.loss import GRPO, PPO, LossWeighting, sample_weights
from megapack.plan.plan import MicroBatch, Plan, Policy, StepPlan

pytestmark = pytest.mark.unit

WEIGHTINGS: tuple[LossWeighting, ...] = get_args(LossWeighting)


def plan_of(
    *steps: Sequence[int],
    num_samples: int | None = None,
    rollout_ids: Sequence[int | str] | None = None,
    padding: int = 0,
) -> Plan:
    """A plan with these samples per step, one per micro-batch, and `padding` padding ones."""
    rows = [
        tuple(MicroBatch((i,), 1, 1, 1, 1) for i in step) + (MicroBatch((), 1, 0, 0, 0),) * padding
        for step in steps
    ]
    return Plan(
        steps=tuple(StepPlan((row,), len(row), None, (), ()) for row in rows),
        layout=Layout(),
        policy=Policy(),
        max_tokens_per_gpu=1,
        micro_batch_size=None,
        num_samples=num_samples if num_samples is not None else sum(map(len, steps)),
        rollout_ids=None if rollout_ids is None else tuple(rollout_ids),
    )


def weights(
    weighting: LossWeighting, counts: Sequence[int], plan: Plan | None = None, **kwargs: Any
) -> list[float]:
    if weighting == "seq-mean-token-sum-norm":
        kwargs.setdefault("norm_constant", 8.0)
    plan = plan or plan_of(range(len(counts)))
    return sample_weights(weighting, counts, plan, **kwargs).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("weighting", "expected"),
    [
        ("token-mean", [1 / 10] * 4),
        ("seq-mean-token-mean", [1 / 4, 1 / 8, 1 / 16, 1 / 12]),
        ("seq-mean-token-sum", [1 / 4] * 4),
        ("seq-mean-token-sum-norm", [1 / 32] * 4),
        # Rollout a has samples 0 and 2 (1 + 4 tokens), b sample 1 (2), c sample 3 (3).
        ("rollout-mean", [1 / 15, 1 / 6, 1 / 15, 1 / 9]),
    ],
)
def test_the_five_weightings_on_four_samples(
    weighting: LossWeighting, expected: list[float]
) -> None:
    plan = plan_of(range(4), rollout_ids=["a", "b", "a", "c"])
    assert weights(weighting, [1, 2, 4, 3], plan) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_dropped_samples_are_in_no_denominator(weighting: LossWeighting) -> None:
    counts = [3, 1, 2, 50, 60]
    ids = ["a", "a", "b", "c", "c"]
    dropped = weights(weighting, counts, plan_of([0, 1, 2], num_samples=5, rollout_ids=ids))
    without = weights(weighting, counts[:3], plan_of([0, 1, 2], rollout_ids=ids[:3]))
    assert dropped == [*without, 0.0, 0.0]


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_each_step_has_its_own_denominator(weighting: LossWeighting) -> None:
    counts = [3, 1, 2, 5]
    plan = plan_of([0, 3], [1, 2])
    first, second = (weights(weighting, counts, plan, step=step) for step in (0, 1))
    assert [first[1], first[2], second[0], second[3]] == [0.0] * 4
    assert [first[0], first[3]] == weights(weighting, [3, 5])
    assert second[1:3] == weights(weighting, [1, 2])


def naive(
    weighting: LossWeighting, losses: list[list[float]], rollouts: list[int], norm: float
) -> float:
    """The definitions written out: means of means or sums, without empty samples."""
    present = [(np.array(x), r) for x, r in zip(losses, rollouts, strict=True) if x]
    samples = [x for x, _ in present]
    if weighting == "token-mean":
        return float(np.concatenate(samples).mean())
    if weighting == "seq-mean-token-mean":
        return float(np.mean([x.mean() for x in samples]))
    if weighting == "seq-mean-token-sum":
        return float(np.mean([x.sum() for x in samples]))
    if weighting == "seq-mean-token-sum-norm":
        return float(np.mean([x.sum() / norm for x in samples]))
    groups = {r: np.concatenate([x for x, other in present if other == r]) for _, r in present}
    return float(np.mean([x.mean() for x in groups.values()]))


@settings(deadline=None)
@given(
    st.sampled_from(WEIGHTINGS),
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), min_size=1, max_size=12).filter(
        lambda pairs: any(count for count, _ in pairs)
    ),
)
def test_weighted_sums_equal_the_plain_definitions(
    weighting: LossWeighting, pairs: list[tuple[int, int]]
) -> None:
    rng = np.random.default_rng(len(pairs))
    losses = [rng.normal(size=count).tolist() for count, _ in pairs]
    rollouts = [rollout for _, rollout in pairs]
    plan = plan_of(range(len(pairs)), rollout_ids=rollouts)
    found = sample_weights(weighting, [len(x) for x in losses], plan, norm_constant=5.0)
    total = sum(w * sum(x) for w, x in zip(found.tolist(), losses, strict=True))
    assert total == pytest.approx(naive(weighting, losses, rollouts, 5.0), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("norm", [None, 0.0, -1.0, float("nan"), float("inf")])
def test_an_invalid_norm_constant_is_refused(norm: float | None) -> None:
    with pytest.raises(ConfigError, match=rf"norm_constant.*{norm}"):
        weights("seq-mean-token-sum-norm", [1], norm_constant=norm)


# Six tokens: one inside the clip range, two above and two below it with advantages of both signs,
# and one far above it with a negative advantage.
LOGP = torch.tensor([-1.0, -1.0, -1.0, -3.0, -3.0, -0.5])
OLD = torch.tensor([-1.1, -2.0, -2.0, -1.0, -1.0, -3.5])
REF = torch.tensor([-1.3, -0.5, -1.0, -2.0, -3.5, -0.7])
ADVANTAGES = torch.tensor([0.5, 2.0, -2.0, 1.0, -1.0, -1.0])
ENTROPY = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
FIELDS = {"advantages": ADVANTAGES, "old_logprobs": OLD, "ref_logprobs": REF}


def losses(objective: Any, entropy: torch.Tensor | None = None) -> list[float]:
    return objective(LOGP, entropy, FIELDS)[0].tolist()  # type: ignore[no-any-return]


def ratios() -> list[float]:
    return (LOGP - OLD).exp().tolist()


def ppo(low: float, high: float, dual: float | None = None) -> list[float]:
    """The clipped loss, one token at a time."""
    out = []
    for ratio, advantage in zip(ratios(), ADVANTAGES.tolist(), strict=True):
        clipped = min(max(ratio, 1 - low), 1 + high)
        gain = min(ratio * advantage, clipped * advantage)
        if dual is not None and advantage < 0:
            gain = max(gain, dual * advantage)
        out.append(-gain)
    return out


def test_the_entropy_bonus_is_subtracted() -> None:
    plain = PPO(entropy_coef=0.5)(LOGP, None, FIELDS)[0]
    assert torch.equal(plain, torch.tensor(losses(PPO())))
    found = torch.tensor(losses(PPO(entropy_coef=0.5), ENTROPY))
    torch.testing.assert_close(found, plain - 0.5 * ENTROPY)
    assert losses(PPO(), ENTROPY) == losses(PPO())


def test_metrics_of_ppo() -> None:
    _, metrics = PPO()(LOGP, ENTROPY, FIELDS)
    assert set(metrics) == {"ratio", "clip_fraction", "kl_old"}
    assert metrics["ratio"].tolist() == pytest.approx(ratios())
    assert metrics["clip_fraction"].tolist() == [0, 1, 1, 1, 1, 1]
    x = (LOGP - OLD).double()
    torch.testing.assert_close(metrics["kl_old"].double(), x.exp() - 1 - x, rtol=1e-4, atol=1e-6)


KL: dict[str, Callable[[float], float]] = {
    "k1": lambda x: x,
    "k2": lambda x: x * x / 2,
    "k3": lambda x: float(np.exp(-x)) - 1 + x,
}


@pytest.mark.parametrize("kind", KL)
def test_grpo_adds_the_kl_to_the_loss(kind: Any) -> None:
    objective = GRPO(kl_coef=0.3, kl_kind=kind, clip_high=0.28, dual_clip=2.0, entropy_coef=0.1)
    loss, metrics = objective(LOGP, ENTROPY, FIELDS)
    kl = [KL[kind](x) for x in (LOGP - REF).tolist()]
    policy = ppo(0.2, 0.28, 2.0)
    terms = zip(policy, kl, ENTROPY.tolist(), strict=True)
    assert loss.tolist() == pytest.approx([p + 0.3 * k - 0.1 * h for p, k, h in terms], rel=1e-5)
    assert metrics["kl_ref"].tolist() == pytest.approx(kl, abs=1e-6)


def test_only_the_policy_has_gradients() -> None:
    inputs = [x.clone().requires_grad_() for x in (LOGP, OLD, REF, ENTROPY)]
    logp, old, ref, entropy = inputs
    fields = {"advantages": ADVANTAGES, "old_logprobs": old.detach(), "ref_logprobs": ref.detach()}
    loss, _ = GRPO(entropy_coef=0.1, kl_coef=0.2)(logp, entropy, fields)
    loss.sum().backward()
    assert logp.grad is not None
    assert entropy.grad is not None
    assert entropy.grad.tolist() == pytest.approx([-0.1] * 6)
    # A clipped token has the gradient of its KL only: d k3 / d logp = 1 - exp(ref - logp).
    clipped = 0.2 * (1 - (REF - LOGP).exp())
    assert logp.grad[1].item() == pytest.approx(clipped[1].item(), rel=1e-5)
    assert logp.grad[0].item() == pytest.approx(clipped[0].item() - 0.5 * ratios()[0], rel=1e-5)
