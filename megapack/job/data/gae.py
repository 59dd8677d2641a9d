"""Generalized advantage estimation (GAE, arXiv 1506.02438) over the tokens that count in the loss.

    rewards, values -> advantages -> returns; advantages -> whitened advantages

Arrays hold the loss tokens of all samples, one sample after the other. Tokens that do not count in
the loss (prompts, outputs of tools between a model's turns) are left out, as in verl: the state
that follows a token is the one in which the sample's next loss token is chosen.

A sample of 3 loss tokens with values 1, 2, 4 and a reward of 5 at the last, gamma = 1, lambda =
0.5. The temporal differences are 2 - 1 = 1, 4 - 2 = 2 and 5 - 4 = 1. From the last token on, an
advantage is its difference plus 0.5 times the advantage after it: 1, 2 + 0.5 and 1 + 1.25. An
advantage plus its value is the return that the critic learns:

>>> rewards = token_rewards([5.0], [3])
>>> advantages = gae(rewards, np.array([1.0, 2.0, 4.0]), [3], gamma=1.0, gae_lambda=0.5)
>>> advantages.tolist()
[2.25, 2.5, 1.0]
>>> (advantages + [1.0, 2.0, 4.0]).tolist()
[3.25, 4.5, 5.0]
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megapack.errors import DataError
from megapack.job.data.advantages import SampleReward

Floats = npt.NDArray[np.float64]

# Keeps the division finite if all advantages are equal.
_VARIANCE_EPS = 1e-8


def checked_rewards(records: Sequence[SampleReward]) -> list[float]:
    """The reward of each sample.

    Raises:
        DataError: a sample has none.
    """
    for record in records:
        if record.reward is None:
            raise DataError(
                f"prompt group {record.group!r} has a sample without a reward, which a critic's "
                "advantages need; give `reward`, or set critic.enabled=false"
            )
    return [record.reward for record in records if record.reward is not None]


def token_rewards(rewards: Sequence[float], num_tokens: Sequence[int]) -> Floats:
    """A reward per loss token: each sample's own at its last one, 0 at the others.

    Args:
        rewards: one per sample. That of a sample without loss tokens is at no token.
        num_tokens: loss tokens of each sample.

    >>> token_rewards([5.0, 7.0, -1.0], [2, 0, 1]).tolist()
    [0.0, 5.0, -1.0]
    """
    counts = np.asarray(num_tokens, dtype=np.int64)
    out = np.zeros(int(counts.sum()))
    ends = np.cumsum(counts)
    has_tokens = counts > 0
    out[ends[has_tokens] - 1] = np.asarray(rewards, dtype=np.float64)[has_tokens]
    return out


def gae(
    rewards: Floats, values: Floats, num_tokens: Sequence[int], *, gamma: float, gae_lambda: float
) -> Floats:
    """Advantages of loss tokens, float64 [tokens].

    With the value V of the state in which token t is chosen, and V = 0 after a sample's end:

        delta_t = reward_t + gamma * V_(t+1) - V_t
        advantage_t = delta_t + gamma * gae_lambda * advantage_(t+1)

    Args:
        rewards, values: [tokens], the samples one after the other.
        num_tokens: loss tokens of each sample.
        gamma: the factor of a reward one token later.
        gae_lambda: 1: the sum of all later rewards minus the value, without bias; 0: the temporal
            difference alone, with the least variance.
    """
    counts = np.asarray(num_tokens, dtype=np.int64)
    ends = np.cumsum(counts)
    next_values = np.roll(values, -1)
    next_values[ends[counts > 0] - 1] = 0.0
    advantages = rewards + gamma * next_values - values
    # The loop goes over distances to a sample's end; each turn takes that token of every sample
    # that is long enough. The longest samples stand first, so these are the first `num_left`.
    longest_first = np.argsort(-counts, kind="stable")
    last = ends[longest_first] - 1
    sorted_counts = counts[longest_first]
    for distance in range(1, int(counts.max(initial=0))):
        num_left = int(np.searchsorted(-sorted_counts, -distance, side="left"))
        place = last[:num_left] - distance
        advantages[place] += gamma * gae_lambda * advantages[place + 1]
    return advantages


def whitened(advantages: Floats) -> Floats:
    """Advantages of mean 0 and variance 1 over all tokens, with n - 1 in the variance.

    >>> whitened(np.array([1.0, 3.0])).round(4).tolist()
    [-0.7071, 0.7071]
    """
    centred: Floats = advantages - (advantages.mean() if advantages.size else 0.0)
    variance = float(centred @ centred) / max(1, centred.size - 1)
    return centred / math.sqrt(variance + _VARIANCE_EPS)


def explained_variance(values: Floats, returns: Floats) -> float | None:
    """1 - variance(returns - values) / variance(returns): 1 for a perfect critic, 0 for a constant.

    None if all returns are equal.

    >>> explained_variance(np.array([0.0, 2.0]), np.array([0.0, 4.0]))
    0.75
    """
    # Not by the variance, which rounding makes positive for equal numbers such as 0.1.
    if not returns.size or returns.max() == returns.min():
        return None
    return 1 - float(np.var(returns - values)) / float(np.var(returns))
