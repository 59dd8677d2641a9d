"""Generated rollouts with something to learn in them: counting.

    prompt   "Count from 7 by 3:"
    response " 7 10 13 16 19 22"

The answers of a group count on for different lengths, lognormal as real responses are. Most are
right (reward 1.0); the others slip once, and all that follows is off (reward 0.0).
"""

from __future__ import annotations

import math
import random

from megapack.data.rollouts import Rollout
from megapack.data.tokenizer import ByteTokenizer
from megapack.errors import ConfigError

# Tokens of a response. Prompt and response together have about 120 tokens, 600 at most.
_MEAN_RESPONSE = 100.0
_SIGMA = 0.8
_MAX_TOKENS = 600
_SLIP_SHARE = 0.3

MEAN_OF_LONGEST = 8
"""The longest sample over the mean, of generated lengths."""


def generate_rollouts(
    num_groups: int, group_size: int, seed: int, tokenizer: ByteTokenizer | None = None
) -> list[Rollout]:
    """`num_groups * group_size` rollouts, group by group; equal arguments give equal rollouts."""
    if num_groups < 1 or group_size < 1:
        raise ConfigError(f"{num_groups} groups of {group_size} rollouts; set both to 1 or more")
    tokenizer = tokenizer or ByteTokenizer()
    rng = random.Random(seed)
    records = []
    for group in range(num_groups):
        start, step = rng.randrange(100), rng.randrange(1, 10)
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
    """Tokens of samples of which nothing is known but the longest: lognormal as above, with a mean
    of an eighth of it; equal arguments give equal lengths."""
    rng = random.Random(seed)
    return [_tokens(rng, longest / MEAN_OF_LONGEST, 1, longest) for _ in range(num_samples)]


def _tokens(rng: random.Random, mean: float, least: int, most: int) -> int:
    # The mean of a lognormal is exp(mu + sigma^2 / 2).
    drawn = rng.lognormvariate(math.log(mean) - _SIGMA**2 / 2, _SIGMA)
    return min(max(int(drawn), least), most)


def _count(rng: random.Random, start: int, step: int, num_bytes: int, right: bool) -> str:
    """Whole numbers from `start`, `num_bytes` long at most, one slip in them unless `right`."""
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
