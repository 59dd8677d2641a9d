"""Generated rollouts and preference pairs that a small model can learn: counting.

    prompt   "Count from 7 by 3:"
    response " 7 10 13 16 19 22"

The answers to one prompt have different lengths, lognormal like those of real responses. Most are
right (reward 1.0). The others slip once, and all numbers after the slip are off (reward 0.0). Of a
preference pair, the right answer is preferred to one with a slip.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megapack.errors import ConfigError
from megapack.job.data.rollouts import Rollout
from megapack.job.data.tokenizer import ByteTokenizer, Ids

_TOKENIZER = ByteTokenizer()
# Chosen by hand. A prompt has about 20 tokens, so a sample has about 120, and 600 at most.
_MEAN_RESPONSE = 100.0
_MAX_TOKENS = 600
# Sigma of the lognormal. With 0.8 a response two sigmas above the median has 360 tokens, one two
# sigmas below has 15.
_SIGMA = 0.8
# Share of wrong answers: the mean reward is about 0.7.
_SLIP_SHARE = 0.3

# Of the generated columns: the teacher's ids per token, the probability of the right one, and the
# standard deviation of the engine's log-probs in nats.
_TOPK = 8
_SURE = 0.9
_ENGINE_NOISE = 0.3

LONGEST_OVER_MEAN = 8
"""Longest / mean of `generate_lengths`: a longest sample of 8192 tokens gives a mean of 1024."""


def generate_rollouts(
    num_groups: int, group_size: int, seed: int, columns: Sequence[str] = ()
) -> list[Rollout]:
    """`group_size` rollouts for each of `num_groups` prompts; equal arguments, equal rollouts.

    Args:
        columns: those of `rollouts.TOKEN_COLUMNS` that samples get. The engine's log-probs are
            those of a uniform distribution, with noise, as before a model has learnt anything. The
            teacher finds the right answer's token likely at each place, and others hardly.
    """
    rng = random.Random(seed)
    records = []
    for prompt in _prompts(rng, num_groups, group_size):
        for rollout in range(group_size):
            num_bytes = prompt.draw_bytes(rng)
            right = rng.random() >= _SLIP_SHARE
            response_ids = prompt.answer(rng, num_bytes, right)
            known = _columns(prompt, response_ids, num_bytes, seed) if columns else {}
            records.append(
                Rollout(
                    prompt_ids=prompt.ids,
                    response_ids=response_ids,
                    columns={name: known[name] for name in columns},
                    reward=1.0 if right else 0.0,
                    group=prompt.group,
                    rollout=rollout,
                )
            )
    return records


def generate_pairs(num_groups: int, group_size: int, seed: int) -> list[Rollout]:
    """`group_size` preference pairs for each of `num_groups` prompts, the preferred sample first.

    Equal arguments, equal pairs.
    """
    rng = random.Random(seed)
    records = []
    for prompt in _prompts(rng, num_groups, group_size):
        for pair in range(group_size):
            num_bytes = prompt.draw_bytes(rng)
            for part, sign in enumerate((1, -1)):
                records.append(
                    Rollout(
                        prompt_ids=prompt.ids,
                        response_ids=prompt.answer(rng, num_bytes, right=sign > 0),
                        group=prompt.group,
                        rollout=pair,
                        part=part,
                        pair_sign=sign,
                    )
                )
    return records


def _columns(
    prompt: _Prompt, response_ids: Ids, num_bytes: int, seed: int
) -> dict[str, npt.NDArray[Any]]:
    """All columns of values per response token of one answer."""
    right_ids = prompt.answer(random.Random(0), num_bytes, right=True)
    size = len(response_ids)
    # Numbers after a slip may have more digits, and the answer more tokens.
    right_ids = np.resize(right_ids, size)
    vocab_size = _TOKENIZER.vocab_size
    others = np.array([np.arange(1, _TOPK) + token for token in right_ids]) % vocab_size
    topk_ids = np.concatenate([right_ids[:, None], others.reshape(size, _TOPK - 1)], axis=1)
    rest = math.log((1 - _SURE) / (vocab_size - 1))
    topk_logprobs = np.full((size, _TOPK), rest)
    topk_logprobs[:, 0] = math.log(_SURE)
    noise = random.Random(f"{seed} {prompt.group} {response_ids.tolist()}")
    engine = [noise.gauss(-math.log(vocab_size), _ENGINE_NOISE) for _ in range(size)]
    return {
        "rollout_logprobs": np.array(engine),
        "teacher_logprobs": np.where(response_ids == right_ids, math.log(_SURE), rest),
        "teacher_topk_ids": topk_ids,
        "teacher_topk_logprobs": topk_logprobs,
    }


@dataclasses.dataclass(frozen=True)
class _Prompt:
    """A prompt and how its answers begin."""

    group: int
    start: int
    step: int
    ids: Ids

    def draw_bytes(self, rng: random.Random) -> int:
        """The most bytes of an answer."""
        return _tokens(rng, _MEAN_RESPONSE, 8, _MAX_TOKENS - len(self.ids) - 1)

    def answer(self, rng: random.Random, num_bytes: int, right: bool) -> Ids:
        """Token ids of an answer, with one slip unless `right`."""
        text = _count(rng, self.start, self.step, num_bytes, right)
        return _TOKENIZER.encode_response(text)


def _prompts(rng: random.Random, num_groups: int, group_size: int) -> Iterator[_Prompt]:
    if num_groups < 1 or group_size < 1:
        raise ConfigError(f"{num_groups} groups of {group_size} rollouts; set both to 1 or more")
    for group in range(num_groups):
        start = rng.randrange(100)
        step = rng.randrange(1, 10)
        ids = _TOKENIZER.encode_prompt(f"Count from {start} by {step}:")
        yield _Prompt(group, start, step, ids)


def generate_lengths(num_samples: int, longest: int, seed: int) -> list[int]:
    """Sample lengths for a config without data: lognormal with mean `longest / LONGEST_OVER_MEAN`.

    Equal arguments give equal lengths.
    """
    rng = random.Random(seed)
    return [_tokens(rng, longest / LONGEST_OVER_MEAN, 1, longest) for _ in range(num_samples)]


def _tokens(rng: random.Random, mean: float, least: int, most: int) -> int:
    # The mean of a lognormal is exp(mu + sigma^2 / 2).
    drawn = rng.lognormvariate(math.log(mean) - _SIGMA**2 / 2, _SIGMA)
    return min(max(int(drawn), least), most)


def _count(rng: random.Random, start: int, step: int, num_bytes: int, right: bool) -> str:
    """Count from `start` in at most `num_bytes` bytes, with one slip unless `right`."""
    numbers = [start]
    length = 1 + len(str(start))
    while length + 1 + len(str(numbers[-1] + step)) <= num_bytes:
        numbers.append(numbers[-1] + step)
        length += 1 + len(str(numbers[-1]))
    if not right:
        first = rng.randrange(len(numbers))
        off = rng.choice([1, 2, 3])
        numbers[first:] = [number + off for number in numbers[first:]]
    return "".join(f" {number}" for number in numbers)
