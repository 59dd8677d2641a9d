"""Generated rollouts that a small model can learn: counting.

    prompt   "Count from 7 by 3:"
    response " 7 10 13 16 19 22"

The answers to one prompt have different lengths, lognormal like those of real responses. Most are
right (reward 1.0). The others slip once, and all numbers after the slip are off (reward 0.0).
"""

from __future__ import annotations

import math
import random

from megapack.data.rollouts import Rollout
from megapack.data.tokenizer import ByteTokenizer
from megapack.errors import ConfigError

# Chosen by hand. A prompt has about 20 tokens, so a sample has about 120, and 600 at most.
_MEAN_RESPONSE = 100.0
_MAX_TOKENS = 600
# Sigma of the lognormal. With 0.8 a response two sigmas above the median has 360 tokens, one two
# sigmas below has 15.
_SIGMA = 0.8
# Share of wrong answers: the mean reward is about 0.7.
_SLIP_SHARE = 0.3

LONGEST_OVER_MEAN = 8
"""Longest / mean of `generate_lengths`: a longest sample of 8192 tokens gives a mean of 1024."""


def generate_rollouts(
    num_groups: int, group_size: int, seed: int, tokenizer: ByteTokenizer | None = None
) -> list[Rollout]:
    """`group_size` rollouts for each of `num_groups` prompts; equal arguments, equal rollouts."""
    if num_groups < 1 or group_size < 1:
        raise ConfigError(f"{num_groups} groups of {group_size} rollouts; set both to 1 or more")
    tokenizer = tokenizer or ByteTokenizer()
    rng = random.Random(seed)
    records = []
    for group in range(num_groups):
        start = rng.randrange(100)
        step = rng.randrange(1, 10)
        prompt_ids = tokenizer.encode_prompt(f"Count from {start} by {step}:")
        for rollout in range(group_size):
            num_bytes = _tokens(rng, _MEAN_RESPONSE, 8, _MAX_TOKENS - len(prompt_ids) - 1)
            right = rng.random() >= _SLIP_SHARE
            text = _count(rng, start, step, num_bytes, right)
            records.append(
                Rollout(
                    prompt_ids=prompt_ids,
                    response_ids=tokenizer.encode_response(text),
                    reward=1.0 if right else 0.0,
                    group=group,
                    rollout=rollout,
                )
            )
    return records


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
