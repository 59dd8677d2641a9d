"""A toy rollout for hosts that train on prompts and responses: groups of samples with rewards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.dist import problem
from tests.hosts.steps.images import START, draw_images

GROUP = 4
"""Samples of one prompt, which GRPO compares."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One response to a prompt."""

    prompt: Tensor
    response: Tensor
    mask: Tensor
    """Which response tokens have a loss, int64: turns of a tool have none."""
    reward: float
    group: int
    images: dict[str, Any] | None = None
    """What a processor makes of its images, whose tokens are in the prompt."""

    @property
    def tokens(self) -> Tensor:
        return torch.cat([self.prompt, self.response])


def draw(
    num_samples: int,
    seed: int = 5,
    longest: int = 44,
    common_prompts: bool = False,
    images: bool = False,
) -> list[Sample]:
    """The same samples on every rank: prompts of 2 to 11 tokens, responses of 2 to `longest`.

    Response lengths are skewed, as rollouts are: most are short, few are long.

    Args:
        common_prompts: samples of a group have one prompt, of 14 tokens.
        images: prompts begin with images, see `images.draw_images`.
    """
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for i in range(num_samples):
        share = float(torch.rand((), generator=generator)) ** 2
        sizes = (int(torch.randint(2, 12, (), generator=generator)), 2 + int(share * (longest - 2)))
        prompt = torch.randint(1, problem.VOCAB_SIZE, (sizes[0],), generator=generator)
        response = torch.randint(1, problem.VOCAB_SIZE, (sizes[1],), generator=generator)
        mask = (torch.rand(sizes[1], generator=generator) < 0.7).long()
        mask[0] = 1
        if common_prompts:
            group = torch.Generator().manual_seed(seed + i // GROUP)
            prompt = torch.randint(1, problem.VOCAB_SIZE, (14,), generator=group)
        reward = float(torch.rand((), generator=generator))
        inputs = None
        if images:
            tokens, inputs = draw_images(i)
            prompt, response = (ids.clamp(max=START - 1) for ids in (prompt, response))
            prompt = torch.cat([torch.tensor(tokens, dtype=prompt.dtype), prompt])
        samples.append(
            Sample(
                prompt=prompt,
                response=response,
                mask=mask,
                reward=reward,
                group=i // GROUP,
                images=inputs,
            )
        )
    return samples
