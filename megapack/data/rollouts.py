"""Rollouts: their JSON Lines format, their batches and advantages.

A line is one sample, or several. Its tokens come from one of these sets of columns:

    {"prompt": "2+2=", "response": "4"}
    {"prompt_ids": [5, 6], "response_ids": [7, 8, 9], "response_mask": [1, 0, 1]}
    {"messages": [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]}
    {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
    {"prompt_ids": [5, 6], "chosen_ids": [7], "rejected_ids": [8]}

- `prompt` and `response`: text, each encoded by itself (`data.tokenizer`). The prompt gets the
  token that begins a sample, if the tokenizer has one (BOS), the response the one that ends it
  (EOS);
- `prompt_ids` and `response_ids`: token ids, used unchanged;
- `response_mask` or `loss_mask`: one 0 or 1 per response id, whether it counts in the loss: 0 for
  what a tool or the environment wrote. Without it all count;
- `routed_experts`: per token id of prompt and response, or of all but the last, the experts that
  the router chose, [MoE layers][k];
- `messages`, and `tools` (a list, or its JSON): a chat, written by the tokenizer's chat template.
  What the assistant's turns say counts; see `chats`. A template that rewrites earlier turns gives
  one sample for each turn that is rewritten later;
- `chosen` and `rejected`: a preference pair, two samples of one rollout, the preferred one first.
  Text after a text `prompt`, or messages: whole chats, or the turns after `prompt` (messages, or
  the text of the user's turn). Of chats only the turns from the first difference on count.

Beside them, for all samples of the line:

- `group`: the prompt's identity (int or string, 1 and "1" differ). Samples of one prompt group
  answer the same prompt. Without it the line is a prompt group by itself;
- `rollout`: the rollout's identity inside its prompt group. Lines with the same group and rollout
  are fan-out samples of one rollout and stay in one optimizer step. Without it the line is a
  rollout by itself;
- `reward` or `advantage`: finite numbers; supervised training needs neither;
- other keys, and null, are ignored.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from megapack.base.choices import AdvantageNorm
from megapack.data.tokenizer import Ids, Mask
from megapack.errors import ConfigError, DataError

# Keeps the division finite if all rewards of a prompt group are equal.
_STD_EPS = 1e-6
# Squared differences of such rewards are at most 4e200, so sums of them stay finite in fp64.
_MAX_REWARD = 1e100


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Rollout:
    """One sample of a rollout: a prompt and its response."""

    prompt_ids: Ids
    """Token ids of the prompt, may be empty. They are not trained on."""
    response_ids: Ids
    """Token ids of the response, may be empty. Prompt and response are never both empty."""
    reward: float | None = None
    """The sample's reward; None = not given."""
    advantage: float | None = None
    """An advantage to use unchanged; None = computed from rewards."""
    group: int | str
    """The prompt group: samples with equal values answer one prompt."""
    rollout: int | str
    """Samples with equal `(group, rollout)` are one rollout."""
    part: int = 0
    """Number of the sample within its line, from 0: a line may give several."""
    loss_mask: Mask | None = None
    """Per token of the response: whether it counts in the loss; None = all do."""
    pair_sign: int = 0
    """1 = the preferred response of a pair, -1 = the other one, 0 = no pair."""
    routed_experts: npt.NDArray[np.uint16] | None = None
    """The experts that each token was routed to, [tokens, MoE layers, k]; None = not given."""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and response, before any padding."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def num_loss_tokens(self) -> int:
        """Response tokens that count in the loss; a sample's first token never does."""
        mask = np.ones(len(self.response_ids), bool) if self.loss_mask is None else self.loss_mask
        return int(mask[0 if len(self.prompt_ids) else 1 :].sum())

    def cut(self, most: int) -> Rollout:
        """The first `most` tokens, with their mask and routes."""
        prompt_ids = self.prompt_ids[:most]
        response_ids = self.response_ids[: most - len(prompt_ids)]
        mask = self.loss_mask
        routes = self.routed_experts
        return dataclasses.replace(
            self,
            prompt_ids=prompt_ids,
            response_ids=response_ids,
            loss_mask=None if mask is None else mask[: len(response_ids)],
            routed_experts=None if routes is None else routes[:most],
        )

    @property
    def key(self) -> tuple[int | str, int | str]:
        """The rollout's identity in the file: `(group, rollout)`."""
        return self.group, self.rollout


def group_batches(
    group_of: npt.NDArray[np.int64],
    prompts_per_batch: int,
    *,
    shuffle: bool = False,
    seed: int = 0,
    epoch: int = 0,
) -> Iterator[npt.NDArray[np.int64]]:
    """Yield sample numbers in batches of whole prompt groups; the last batch may be smaller.

    The samples of a prompt group follow each other in file order. Prompt groups come in the order
    of their first sample, or are shuffled by `(seed, epoch)` alone, equally on every rank and
    machine.

    Args:
        group_of: int64 [samples], prompt groups numbered from 0 by first appearance.
        prompts_per_batch: prompt groups in a batch.
    """
    if prompts_per_batch < 1:
        raise ConfigError(f"data.prompts_per_batch is {prompts_per_batch}; set 1 or more")
    # Prompt groups are numbered by first appearance, so this order is also that of the files.
    samples = np.argsort(group_of, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(group_of))])
    order = np.arange(len(starts) - 1)
    if shuffle:
        # NumPy keeps the raw bits of a bit generator stable across versions, but not `permutation`.
        keys = np.random.PCG64([seed, epoch]).random_raw(len(order))
        order = np.argsort(keys, kind="stable")
    for first in range(0, len(order), prompts_per_batch):
        chosen = order[first : first + prompts_per_batch]
        yield np.concatenate([samples[starts[g] : starts[g + 1]] for g in chosen])


@dataclasses.dataclass(frozen=True)
class SampleReward:
    """The fields of `Rollout` that a sample's advantage is computed from."""

    group: int | str
    rollout: int | str
    reward: float | None = None
    advantage: float | None = None


def group_advantages(
    records: Sequence[SampleReward], mode: AdvantageNorm = "group"
) -> npt.NDArray[np.float64]:
    """Advantages, float64 [len(records)].

    A given `advantage` is used unchanged. Otherwise it follows from the sample's reward R and the
    mean and standard deviation (n - 1) over the rollouts of its prompt group. Each rollout counts
    once, with the mean reward of its fan-out samples:

    - "group": R - mean;
    - "group-std": (R - mean) / (std + 1e-6);
    - "none": R.

    Rewards 1, 0, 0, 1 of one prompt group give 0.5, -0.5, -0.5, 0.5 under "group". A prompt group
    of one rollout has no other to compare with: the mean is its own reward, and a single sample
    gets 0. It is never divided by a standard deviation.

    Raises:
        DataError: a sample has neither reward nor advantage, only some samples of a prompt group
            have an advantage, or a reward is so large that differences could overflow.
    """
    groups: dict[int | str, list[int]] = {}
    for index, record in enumerate(records):
        groups.setdefault(record.group, []).append(index)
    advantages = np.zeros(len(records))
    for group, members in groups.items():
        given = [records[index].advantage for index in members]
        if all(value is not None for value in given):
            advantages[members] = cast("list[float]", given)
            continue
        if any(value is not None for value in given):
            raise DataError(f"group {group!r} has samples with and without `advantage`; give all")
        rewards = [records[index].reward for index in members]
        if any(value is None for value in rewards):
            raise DataError(
                f"group {group!r} has a sample with neither `reward` nor `advantage`; give one"
            )
        values = np.array(rewards, dtype=np.float64)
        if mode != "none" and np.abs(values).max() > _MAX_REWARD:
            raise DataError(
                f"group {group!r} has a reward of {values[np.abs(values).argmax()]:.3g}; give "
                f"rewards of at most {_MAX_REWARD:.0e}"
            )
        advantages[members] = _centred(values, [records[i].rollout for i in members], mode)
    return advantages


def _centred(
    rewards: npt.NDArray[np.float64], rollouts: Sequence[int | str], mode: AdvantageNorm
) -> npt.NDArray[np.float64]:
    if mode == "none":
        return rewards
    samples: dict[int | str, list[float]] = {}
    for rollout, reward in zip(rollouts, rewards.tolist(), strict=True):
        samples.setdefault(rollout, []).append(reward)
    means = [_mean(values) for values in samples.values()]
    centred = rewards - _mean(means)
    if mode == "group" or len(means) == 1:
        return centred
    return centred / (np.std(means, ddof=1) + _STD_EPS)


def _mean(values: Sequence[float]) -> float:
    # Summing differences from the first value makes the mean of equal rewards exactly that reward,
    # so that their advantages are exactly 0.
    first = values[0]
    return first + math.fsum(value - first for value in values) / len(values)
