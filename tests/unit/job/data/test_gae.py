"""GAE against sums by hand and against its definition as a sum over later tokens."""

from __future__ import annotations

import numpy as np
import pytest

from megapack.job.data.gae import explained_variance, gae, token_rewards, whitened


def test_two_samples_by_hand() -> None:
    """Sample 0: values 1, 2; reward 3. Sample 1: value 5; reward 1. gamma 0.9, lambda 0.5.

    Sample 0, last token: 3 - 2 = 1; first: 0.9 * 2 - 1 = 0.8, plus 0.9 * 0.5 * 1 = 1.25.
    Sample 1: 1 - 5 = -4. Its value is not the state after sample 0's end.
    """
    rewards = token_rewards([3.0, 1.0], [2, 1])
    found = gae(rewards, np.array([1.0, 2.0, 5.0]), [2, 1], gamma=0.9, gae_lambda=0.5)
    assert found == pytest.approx([1.25, 1.0, -4.0])


def by_definition(
    rewards: np.ndarray, values: np.ndarray, gamma: float, gae_lambda: float
) -> list[float]:
    """Equation 16 of the paper: the sum over l of (gamma * lambda)^l * delta_(t + l)."""
    after = [*values, 0.0][1:] if len(values) else []
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, after, values, strict=True)]
    return [
        sum((gamma * gae_lambda) ** (k - t) * deltas[k] for k in range(t, len(deltas)))
        for t in range(len(deltas))
    ]


def test_samples_of_many_lengths_agree_with_the_definition() -> None:
    rng = np.random.default_rng(0)
    counts = [3, 0, 7, 1, 7, 0, 2]
    rewards = rng.normal(size=sum(counts))
    values = rng.normal(size=sum(counts))
    found = gae(rewards, values, counts, gamma=0.97, gae_lambda=0.9)
    expected = []
    start = 0
    for count in counts:
        part = slice(start, start + count)
        expected += by_definition(rewards[part], values[part], 0.97, 0.9)
        start += count
    assert found == pytest.approx(expected)


def test_whitening() -> None:
    found = whitened(np.array([1.0, 2.0, 3.0, 6.0]))
    assert found.mean() == pytest.approx(0)
    assert found.std(ddof=1) == pytest.approx(1)
    assert whitened(np.array([2.0, 2.0])).tolist() == [0.0, 0.0]
    assert whitened(np.array([4.0])).tolist() == [0.0]


def test_explained_variance() -> None:
    returns = np.array([1.0, 2.0, 6.0])
    assert explained_variance(returns, returns) == 1
    assert explained_variance(np.zeros(3), returns) == pytest.approx(0)
    assert explained_variance(-returns, returns) == pytest.approx(-3)
    assert explained_variance(returns, np.ones(3)) is None
