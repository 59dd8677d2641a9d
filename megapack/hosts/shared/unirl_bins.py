"""Bins of samples under a budget of computed tokens: real tokens or padded rectangles."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megapack.errors import PlanError
from megapack.hosts.shared.balancing import first_fit_decreasing_pack
from megapack.planner.bins import pack_to_targets
from megapack.planner.counts import split_heaviest

MicroCostModel = Literal["sum", "dense"]
Bins = list[list[int]]


@dataclass(frozen=True)
class SampleSizes:
    """Tokens of a rank's samples."""

    prompt: list[int]
    response: list[int]
    cost_model: MicroCostModel

    def total(self, sample: int) -> int:
        return self.prompt[sample] + self.response[sample]

    def cost(self, samples: Sequence[int]) -> int:
        """Tokens that a micro-batch computes.

        "sum" counts real tokens. Under "dense", prompts are padded to the longest prompt and
        responses to the longest response: (2, 5) and (3, 1) compute 2 * (3 + 5) = 16 tokens.
        """
        if self.cost_model == "sum":
            return sum(self.total(i) for i in samples)
        longest = max(self.prompt[i] for i in samples) + max(self.response[i] for i in samples)
        return longest * len(samples)


def read_sizes(
    response: Sequence[int] | None,
    prompt: Sequence[int] | None,
    num_samples: int,
    cost_model: MicroCostModel,
) -> SampleSizes | None:
    """Sizes of a rank's samples; None without response lengths.

    Raises:
        PlanError: the number of lengths is not the number of samples.
    """
    if response is None:
        return None
    prompts = [0] * num_samples if prompt is None else [max(0, int(n)) for n in prompt]
    # An empty response counts as one token, so that every sample has a size.
    responses = [max(1, int(n)) for n in response]
    for name, values in (("response", responses), ("prompt", prompts)):
        if len(values) != num_samples:
            raise PlanError(f"{len(values)} {name} lengths for {num_samples} samples")
    return SampleSizes(prompts, responses, cost_model)


def pack_bins(sizes: SampleSizes, update: range, budget: int) -> Bins:
    """Pack by first-fit-decreasing; a sample over the budget is alone."""
    if sizes.cost_model == "sum":
        bins = first_fit_decreasing_pack([sizes.total(i) for i in update], budget)
        return [[update.start + k for k in members] for members in bins]
    bins = []
    for i in sorted(update, key=lambda i: (-sizes.total(i), i)):
        with_room = (members for members in bins if sizes.cost([*members, i]) <= budget)
        members = next(with_room, None)
        if members is None:
            bins.append([i])
        else:
            members.append(i)
    return bins


def change_count(sizes: SampleSizes, update: range, bins: Bins, count: int, budget: int) -> Bins:
    """Turn bins into exactly `count` bins, none of them empty.

    Bins within the budget stay within it. `count` is at least the number of bins, and at most the
    number of samples.
    """
    if sizes.cost_model == "dense":
        return _split_to(sizes, bins, count)
    tokens = np.array([sizes.total(i) for i in update], dtype=np.int64)
    work = tokens.astype(np.float64)
    row_of = pack_to_targets(tokens, work, np.full(count, work.sum() / count), budget)
    if row_of is None:
        row_of = np.empty(tokens.size, dtype=np.int64)
        for row, members in enumerate(bins):
            row_of[np.array(members) - update.start] = row
        row_of, _ = split_heaviest(row_of, len(bins), count, work)
    exact: Bins = [[] for _ in range(count)]
    for i in sorted(update, key=lambda i: (-sizes.total(i), i)):
        exact[row_of[i - update.start]].append(i)
    return exact


def _split_to(sizes: SampleSizes, bins: Bins, count: int) -> Bins:
    """Repeatedly split the bin with the most computed tokens into longer and shorter samples.

    Neither part's rectangle is larger than the whole's.
    """
    heap = [(-sizes.cost(members), members) for members in bins if len(members) > 1]
    heapq.heapify(heap)
    single = [members for members in bins if len(members) == 1]
    while len(heap) + len(single) < count:
        _, members = heapq.heappop(heap)
        middle = (len(members) + 1) // 2
        for part in (members[:middle], members[middle:]):
            if len(part) > 1:
                heapq.heappush(heap, (-sizes.cost(part), part))
            else:
                single.append(part)
    return [members for _, members in heap] + single
