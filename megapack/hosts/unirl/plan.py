"""A plan of UniRL's micro-batches: rows under a token budget, as many on every rank."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Literal, get_args

import numpy as np

from megapack.base.arrays import Ints, check_count
from megapack.errors import ConfigError, PlanError
from megapack.hosts.shared.rank_rows import Rows, agree_on_numbers, log_own, split_rows

logger = logging.getLogger(__name__)

Range = tuple[int, int]
MicroCostModel = Literal["sum", "dense"]


@dataclass(frozen=True)
class MicroPlan:
    """Micro-batches as ranges of the track arranged in `order`."""

    order: list[int]
    """Track index at each arranged position."""
    updates: list[list[Range]]
    """The micro-batches of each update (optimizer step), `(start, end)` in arranged positions."""
    tokens: int
    """Real tokens; 0 without a budget."""
    computed_tokens: int
    """Tokens that the forward computes: under "dense" those of the padded rectangles. 0 without a
    budget."""
    response_tokens: list[int]
    """Response tokens of each sample, in track order; empty without a budget."""
    mean_response_tokens: list[float]
    """Response tokens of a rank in each update, the mean over all ranks; empty without a budget."""

    @property
    def efficiency(self) -> float:
        """Real over computed tokens; 1 without a budget."""
        return self.tokens / self.computed_tokens if self.computed_tokens else 1.0

    def sample_shares(self, update: int) -> list[float]:
        """Weights of an update's micro-batches, for losses that are means over samples.

        The weights sum to 1; with them the gradient is that of the mean over the update.
        """
        sizes = [end - start for start, end in self.updates[update]]
        return [size / sum(sizes) for size in sizes]

    def token_shares(self, update: int) -> list[float]:
        """Weights of an update's micro-batches, for losses that are means over response tokens.

        With them, and FSDP's mean over ranks, the gradient is that of the mean over all tokens that
        all ranks have in the update. Two ranks with 30 and 10 tokens have a mean of 20, so a
        micro-batch of 10 tokens weighs 1/2 on both.

        Raises:
            PlanError: the plan has no budget, so the ranks have not told their tokens.
        """
        if not self.mean_response_tokens:
            raise PlanError("plans by count know no tokens; set micro_token_budget")
        mean = self.mean_response_tokens[update] or 1.0
        return [
            sum(self.response_tokens[i] for i in self.order[start:end]) / mean
            for start, end in self.updates[update]
        ]

    @property
    def places(self) -> list[int]:
        """The arranged position of each track index: the inverse of `order`."""
        return sorted(range(len(self.order)), key=self.order.__getitem__)


@dataclass(frozen=True)
class _Sizes:
    """Tokens of a rank's samples."""

    prompt: Ints
    response: Ints
    """An empty response counts as one token, so that every sample has a size."""
    packs: bool
    """Whether a micro-batch computes its real tokens."""

    @classmethod
    def read(
        cls, response: Sequence[int], prompt: Sequence[int] | None, num_samples: int, packs: bool
    ) -> _Sizes:
        """Raise PlanError if the number of lengths is not the number of samples."""
        prompt = [0] * num_samples if prompt is None else prompt
        for name, values in (("response", response), ("prompt", prompt)):
            if len(values) != num_samples:
                raise PlanError(f"{len(values)} {name} lengths for {num_samples} samples")
        prompts, responses = (
            np.array([max(least, int(value)) for value in values], dtype=np.int64)
            for least, values in ((0, prompt), (1, response))
        )
        return cls(prompts, responses, packs)

    @property
    def total(self) -> Ints:
        """int64 [samples]: tokens of each."""
        return self.prompt + self.response

    def cost(self, samples: Sequence[int]) -> int:
        """Tokens that a micro-batch computes.

        "sum" counts real tokens. Under "dense" prompts are padded to the longest prompt and
        responses to the longest response: (2, 5) and (3, 1) compute 2 * (3 + 5) = 16 tokens.
        """
        members = list(samples)
        if self.packs:
            return int(self.total[members].sum())
        return int(self.prompt[members].max() + self.response[members].max()) * len(members)


@dataclass(frozen=True)
class _Rank:
    updates: list[range]
    sizes: _Sizes | None
    rows: list[Rows]
    """The rows of each update, as few as are found; no rows without sizes."""
    response_tokens: list[int]
    """Of each sample; empty without sizes."""

    @property
    def numbers(self) -> list[int]:
        """What ranks tell each other: samples, whether there are no lengths, and of each update the
        rows and the response tokens."""
        tokens = [sum(self.response_tokens[own.start : own.stop]) for own in self.updates]
        num_samples = self.updates[-1].stop
        return [num_samples, int(self.sizes is None), *map(len, self.rows), *tokens]


def plan_micro_batches(
    response_lengths: Sequence[int] | None,
    *,
    num_samples: int,
    micro_token_budget: int | None = None,
    micro_batch_size: int = 1,
    micro_cost_model: MicroCostModel = "dense",
    num_updates: int = 1,
    prompt_lengths: Sequence[int] | None = None,
) -> MicroPlan | None:
    """Plan this rank's micro-batches; with a budget a collective call of all ranks.

    Every update trains on the same samples as without a plan.

    Args:
        response_lengths: tokens per sample. None: this rank has no lengths.
        num_samples: samples of this rank's track.
        micro_token_budget: computed tokens per micro-batch; a larger sample is alone. None plans
            by count.
        micro_batch_size: samples per micro-batch of plans by count.
        micro_cost_model: "sum" counts real tokens, "dense" the padded rectangle.
        num_updates: optimizer steps; each has the same number of samples.
        prompt_lengths: tokens per prompt; None counts responses alone.

    Returns:
        None on all ranks if one of them has no lengths.

    Raises:
        ConfigError: settings that no rank can run.
        PlanError: one rank has fewer samples than another has micro-batches.
        ScheduleError: on all ranks, if one fails; it names the rank and its error.
    """

    if micro_cost_model not in (known := get_args(MicroCostModel)):
        raise ConfigError(f"micro_cost_model={micro_cost_model!r}; set one of {known}")
    if micro_token_budget is None:
        check_count("num_updates", num_updates)
        check_count("micro_batch_size", size := micro_batch_size)
        updates = _updates(num_samples, num_updates)
        ranges = [[(k, min(k + size, own.stop)) for k in own[::size]] for own in updates]
        return MicroPlan(list(range(num_samples)), ranges, 0, 0, [], [])
    budget, packs = micro_token_budget, micro_cost_model == "sum"

    def read() -> _Rank:
        # Checked inside `read`, so that a rank with wrong arguments does not raise alone.
        check_count("num_updates", num_updates)
        check_count("micro_token_budget", budget)
        updates = _updates(num_samples, num_updates)
        if response_lengths is None:
            return _Rank(updates, None, [[] for _ in updates], [])
        sizes = _Sizes.read(response_lengths, prompt_lengths, num_samples, packs)
        rows = [_rectangles(sizes, update, budget) for update in updates]
        return _Rank(updates, sizes, rows, [max(0, int(n)) for n in response_lengths])

    settings = f"{num_updates} {budget} {micro_cost_model}"
    rank, numbers = agree_on_numbers(read, lambda rank: rank.numbers, settings)
    if rank.sizes is None or numbers[:, 1].any():
        log_own("UniRL", "a rank's track has no lengths, or no [samples, columns] prompt masks")
        return None
    counts, tokens = np.split(numbers[:, 2:], 2, axis=1)
    fewest_samples = int(numbers[:, 0].min()) // num_updates
    if counts.max() > fewest_samples:
        raise PlanError(
            f"a rank needs {counts.max()} micro-batches in an update, another has {fewest_samples} "
            "samples in it; raise micro_token_budget or give all ranks that many samples"
        )
    means = tokens.mean(axis=0).tolist()
    return _budget_plan(rank, rank.sizes, counts.max(axis=0).tolist(), means, budget)


def _updates(num_samples: int, num_updates: int) -> list[range]:
    if num_samples < 1 or num_samples % num_updates:
        raise PlanError(
            f"{num_samples} samples do not divide into num_updates={num_updates} updates; set a "
            "divisor"
        )
    size = num_samples // num_updates
    return [range(k, k + size) for k in range(0, num_samples, size)]


def _rectangles(sizes: _Sizes, update: range, budget: int) -> Rows:
    """First-fit, the longest sample first, of rows whose tokens are not a sum of their samples'; a
    sample over the budget is alone."""
    rows: Rows = []
    for i in sorted(update, key=lambda i: -int(sizes.total[i])):
        with_room = (row for row in rows if sizes.cost([*row, i]) <= budget)
        row = next(with_room, None)
        if row is None:
            rows.append([i])
        else:
            row.append(i)
    return rows


def _budget_plan(
    rank: _Rank, sizes: _Sizes, counts: list[int], mean_tokens: list[float], budget: int
) -> MicroPlan:
    """`counts` micro-batches in each update, the most that any rank needs."""
    order: list[int] = []
    ranges: list[list[Range]] = []
    computed = 0
    for update, own, count in zip(rank.updates, rank.rows, counts, strict=True):
        # A part of a row computes no more tokens than the row, so the budget still holds.
        inside = [[i - update.start for i in row] for row in own]
        split = split_rows(inside, count, sizes.total[update.start : update.stop])
        rows = [[i + update.start for i in row] for row in split]
        # Heaviest first on every rank, so that micro-batches which run together cost about as much.
        rows.sort(key=lambda row: (-sizes.cost(row), row))
        ranges.append(list(pairwise(accumulate(map(len, rows), initial=len(order)))))
        order.extend(chain.from_iterable(rows))
        computed += sum(map(sizes.cost, rows))
    # An empty response has a size, but no real token.
    tokens = int(sizes.prompt.sum()) + sum(rank.response_tokens)
    plan = MicroPlan(order, ranges, tokens, computed, rank.response_tokens, mean_tokens)
    logger.info(
        "%d samples in %s micro-batches per update of at most %d tokens, efficiency %.3f (%d real "
        "of %d computed tokens)",
        *(len(order), counts, budget, plan.efficiency, tokens, computed),
    )
    return plan
