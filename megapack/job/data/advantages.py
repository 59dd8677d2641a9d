"""Rewards of rollouts become advantages; all ranks compute the same from the index.

rewards -> minus the penalty of overlong responses -> advantages of the batch's samples
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from megapack.base.choices import AdvantageNorm
from megapack.errors import DataError

# Keeps the division finite if all rewards are equal.
_STD_EPS = 1e-6
# Squared differences of such rewards are at most 4e200, so sums of them stay finite in fp64.
_MAX_REWARD = 1e100

Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class SampleReward:
    """What a sample's advantage is computed from: its reward, or the advantage itself."""

    group: int | str
    rollout: int | str
    reward: float | None = None
    advantage: float | None = None


def group_advantages(records: Sequence[SampleReward], mode: AdvantageNorm = "group") -> Floats:
    """Advantages of a batch's samples, float64 [len(records)].

    >>> records = [SampleReward(group=0, rollout=i, reward=r) for i, r in enumerate([1.0, 0.0])]
    >>> group_advantages(records).tolist()
    [0.5, -0.5]

    A given `advantage` is used unchanged. Otherwise it follows from the sample's reward R. Means
    and standard deviations (n - 1) are over rollouts, each of which counts once, with the mean
    reward of its fan-out samples:

    - "group": R - mean of the prompt group (Dr. GRPO, arXiv 2503.20783);
    - "group-std": (R - mean) / (std + 1e-6), both of the prompt group (GRPO, arXiv 2402.03300);
    - "rloo": R - mean of the prompt group's other rollouts (leave-one-out, arXiv 2402.14740);
    - "reinforce++": (R - mean) / (std + 1e-6), both of the batch (arXiv 2501.03262);
    - "reinforce++-baseline": R - mean of the prompt group, divided by the standard deviation
      (+ 1e-6) of these differences over the batch (the same paper's variant with a baseline);
    - "none": R.

    A batch of two prompt groups with rewards 1, 0, 0, 1 and 1, 1, 0, 1:

    | mode | first group | second group |
    |---|---|---|
    | "group" | 0.5, -0.5, -0.5, 0.5 | 0.25, 0.25, -0.75, 0.25 |
    | "group-std" | 0.866, -0.866, -0.866, 0.866 | 0.5, 0.5, -1.5, 0.5 |
    | "rloo" | 0.667, -0.667, -0.667, 0.667 | 0.333, 0.333, -1, 0.333 |
    | "reinforce++" | 0.725, -1.208, -1.208, 0.725 | 0.725, 0.725, -1.208, 0.725 |
    | "reinforce++-baseline" | 1, -1, -1, 1 | 0.5, 0.5, -1.5, 0.5 |

    A prompt group of one rollout has no other to compare with: the mean is its own reward, and a
    single sample gets 0. Nothing is divided by the standard deviation of one rollout.

    The paper's REINFORCE++ also subtracts each token's KL penalty from the reward; here the KL
    penalty is in the loss (`objective.kl_coef`). OpenRLHF, verl and slime take the batch's mean and
    standard deviation over tokens, so that long responses weigh more there.

    Args:
        records: the samples of a whole batch.

    Raises:
        DataError: a sample has neither reward nor advantage, only some samples of a prompt group
            have an advantage, or a reward is so large that differences could overflow.
    """
    advantages = np.zeros(len(records))
    groups: list[_Group] = []
    for name, members in _by_name(record.group for record in records).items():
        given = [records[index].advantage for index in members]
        if all(value is not None for value in given):
            advantages[members] = cast("list[float]", given)
            continue
        if any(value is not None for value in given):
            raise DataError(f"group {name!r} has samples with and without `advantage`; give all")
        groups.append(_read_group(name, members, records, limited=mode != "none"))
    for group, values in zip(groups, _normalized(groups, mode), strict=True):
        advantages[group.members] = values
    return advantages


@dataclasses.dataclass(frozen=True)
class _Group:
    """The samples of a prompt group whose advantages follow from rewards."""

    members: list[int]
    """Indices of the samples in the batch."""
    rewards: Floats
    """Of each sample."""
    rollout_of: list[int]
    """Each sample's rollout, from 0 in the group."""
    rollout_rewards: list[float]
    """Mean reward of each rollout's samples."""

    @property
    def mean(self) -> float:
        return _mean(self.rollout_rewards)

    def mean_of_others(self) -> Floats:
        """For each sample the mean over the group's other rollouts; its own reward if none."""
        rewards = self.rollout_rewards
        if len(rewards) == 1:
            return np.full(len(self.members), rewards[0])
        others = [_mean(rewards[:i] + rewards[i + 1 :]) for i in range(len(rewards))]
        return np.array(others)[self.rollout_of]


def _read_group(
    name: int | str, members: list[int], records: Sequence[SampleReward], *, limited: bool
) -> _Group:
    given = [records[index].reward for index in members]
    if any(value is None for value in given):
        raise DataError(
            f"group {name!r} has a sample with neither `reward` nor `advantage`; give one"
        )
    rewards = np.array(given, dtype=np.float64)
    if limited and np.abs(rewards).max() > _MAX_REWARD:
        raise DataError(
            f"group {name!r} has a reward of {rewards[np.abs(rewards).argmax()]:.3g}; give "
            f"rewards of at most {_MAX_REWARD:.0e}"
        )
    rollouts = list(_by_name(records[index].rollout for index in members).values())
    rollout_of = [0] * len(members)
    for number, samples in enumerate(rollouts):
        for sample in samples:
            rollout_of[sample] = number
    means = [_mean(rewards[samples].tolist()) for samples in rollouts]
    return _Group(members, rewards, rollout_of, means)


def _normalized(groups: Sequence[_Group], mode: AdvantageNorm) -> list[Floats]:
    """The advantages of each group's samples."""
    if mode == "none":
        return [group.rewards for group in groups]
    if mode == "rloo":
        return [group.rewards - group.mean_of_others() for group in groups]
    if mode == "group":
        return [group.rewards - group.mean for group in groups]
    if mode == "group-std":
        return [(group.rewards - group.mean) / _divisor(group.rollout_rewards) for group in groups]
    everything = [reward for group in groups for reward in group.rollout_rewards]
    if mode == "reinforce++":
        mean = _mean(everything) if everything else 0.0
        return [(group.rewards - mean) / _divisor(everything) for group in groups]
    centred = [reward - group.mean for group in groups for reward in group.rollout_rewards]
    return [(group.rewards - group.mean) / _divisor(centred) for group in groups]


def _divisor(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1)) + _STD_EPS if len(values) > 1 else 1.0


def _by_name(names: Iterable[int | str]) -> dict[int | str, list[int]]:
    """The positions of each name, in the order of first appearance."""
    positions: dict[int | str, list[int]] = {}
    for position, name in enumerate(names):
        positions.setdefault(name, []).append(position)
    return positions


def _mean(values: Sequence[float]) -> float:
    # Summing differences from the first value makes the mean of equal rewards exactly that reward,
    # so that their advantages are exactly 0.
    first = values[0]
    return first + math.fsum(value - first for value in values) / len(values)


def penalize_overlong(
    records: Sequence[SampleReward],
    response_tokens: Sequence[int],
    *,
    max_response_tokens: int,
    buffer_tokens: int,
    penalty: float,
) -> list[SampleReward]:
    """Lower the rewards of responses that are too long: DAPO's soft punishment.

    Equation 13 of arXiv 2503.14476. The last `buffer_tokens` before `max_response_tokens` are the
    buffer. A response that ends before it keeps its reward, one that fills it loses `penalty`, and
    within it the loss grows linearly. With a maximum of 100, a buffer of 20 and a penalty of 1:

    | response tokens | 80 | 85 | 90 | 100 | 120 |
    |---|---|---|---|---|---|
    | change of the reward | 0 | -0.25 | -0.5 | -1 | -1 |

    A sample without a reward, whose advantage is given, does not change.

    Args:
        response_tokens: of each record's response, also those that do not count in the loss.
    """
    start = max_response_tokens - buffer_tokens
    return [
        record
        if record.reward is None or tokens <= start
        else dataclasses.replace(
            record, reward=record.reward - penalty * min((tokens - start) / buffer_tokens, 1.0)
        )
        for record, tokens in zip(records, response_tokens, strict=True)
    ]
