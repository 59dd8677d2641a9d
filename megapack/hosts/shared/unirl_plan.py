"""A plan of UniRL's micro-batches: bins under a token budget, as many on every rank."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TypeVar, get_args

import numpy as np

from megapack.base.arrays import check_count
from megapack.errors import ConfigError, PlanError
from megapack.hosts.shared.unirl_bins import (
    Bins,
    MicroCostModel,
    SampleSizes,
    change_count,
    pack_bins,
    read_sizes,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")
Range = tuple[int, int]


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
    """Tokens that the forward computes: under "dense" the padded rectangles. 0 without a budget."""
    response_tokens: list[int] = field(default_factory=list)
    """Response tokens of each sample, in track order; empty without a budget."""
    mean_response_tokens: list[float] = field(default_factory=list)
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

    def restore(self, rows: Sequence[T]) -> list[T]:
        """Put the replays' results, one per sample in arranged order, back into track order."""
        if len(rows) != len(self.order):
            raise PlanError(f"{len(rows)} rows for {len(self.order)} samples; give one per sample")
        return [rows[place] for place in self.places]


@dataclass(frozen=True)
class _Rank:
    updates: list[range]
    sizes: SampleSizes | None
    bins: list[Bins]
    """The bins of each update, as first-fit-decreasing packs them; empty without sizes."""
    response_tokens: list[int]
    """Of each sample; empty without sizes."""

    @property
    def update_tokens(self) -> list[int]:
        """Response tokens of each update."""
        tokens = self.response_tokens
        return [sum(tokens[update.start : update.stop]) for update in self.updates]


@dataclass(frozen=True)
class _AllRanks:
    bins: list[int]
    """Bins of each update, the most that any rank needs."""
    mean_tokens: list[float]
    """Response tokens of a rank in each update, the mean over all ranks."""


def plan_micro_batches(
    response_lengths: Sequence[int] | None,
    *,
    num_samples: int,
    num_updates: int = 1,
    micro_batch_size: int = 1,
    micro_token_budget: int | None = None,
    micro_cost_model: MicroCostModel = "dense",
    prompt_lengths: Sequence[int] | None = None,
) -> MicroPlan:
    """Plan this rank's micro-batches; with a budget a collective call of all ranks.

    Every update trains on the same samples with and without a budget.

    Args:
        response_lengths: tokens per sample. None: this rank has no lengths, and all ranks plan by
            count.
        num_samples: samples of this rank's track.
        num_updates: optimizer steps; each has the same number of samples.
        micro_batch_size: samples per micro-batch of plans by count.
        micro_token_budget: computed tokens per micro-batch; None plans by count. A larger sample is
            alone.
        micro_cost_model: "sum" counts real tokens, "dense" the padded rectangle.
        prompt_lengths: tokens per prompt; None counts responses alone.

    Raises:
        ConfigError: settings that no rank can run.
        PlanError: all ranks fail equally, or one has fewer samples than another has bins.
        ScheduleError: on all ranks, if one fails; it names the rank and its error.
    """

    def check() -> list[range]:
        check_count("num_updates", num_updates)
        check_count("micro_batch_size", micro_batch_size)
        check_count("micro_token_budget", micro_token_budget)
        if micro_cost_model not in get_args(MicroCostModel):
            raise ConfigError(
                f"micro_cost_model={micro_cost_model!r}; set one of {get_args(MicroCostModel)}"
            )
        return _updates(num_samples, num_updates)

    if micro_token_budget is None:
        return _count_plan(check(), micro_batch_size, num_samples)

    def read() -> _Rank:
        # Checked inside `read`, so that a rank with wrong arguments does not raise alone.
        updates = check()
        sizes = read_sizes(response_lengths, prompt_lengths, num_samples, micro_cost_model)
        if sizes is None:
            return _Rank(updates, None, [[] for _ in updates], [])
        bins = [pack_bins(sizes, update, micro_token_budget) for update in updates]
        return _Rank(updates, sizes, bins, [max(0, int(n)) for n in response_lengths or ()])

    settings = f"{num_updates} {micro_batch_size} {micro_token_budget} {micro_cost_model}"
    rank, ranks = _agree(read, settings, num_samples)
    if ranks is None:
        logger.warning("a rank has no lengths per sample; all ranks plan by micro_batch_size")
        return _count_plan(rank.updates, micro_batch_size, num_samples)
    return _budget_plan(rank, ranks, micro_token_budget)


def _updates(num_samples: int, num_updates: int) -> list[range]:
    if num_samples < 1 or num_samples % num_updates:
        raise PlanError(
            f"{num_samples} samples do not divide into num_updates={num_updates} updates; set a "
            "divisor"
        )
    size = num_samples // num_updates
    return [range(k, k + size) for k in range(0, num_samples, size)]


def _count_plan(updates: list[range], micro_batch_size: int, num_samples: int) -> MicroPlan:
    ranges = [
        [
            (start, min(start + micro_batch_size, update.stop))
            for start in range(update.start, update.stop, micro_batch_size)
        ]
        for update in updates
    ]
    return MicroPlan(list(range(num_samples)), ranges, tokens=0, computed_tokens=0)


def _agree(
    read: Callable[[], _Rank], settings: str, num_samples: int
) -> tuple[_Rank, _AllRanks | None]:
    """Read this rank, and learn of all ranks by one all-reduce; None if a rank has no lengths.

    An error of one rank is raised on all.
    """
    # If torch.distributed was never imported, no process group can exist.
    dist = sys.modules.get("torch.distributed")
    alone = dist is None or not dist.is_available() or not dist.is_initialized()
    rank = read() if alone else _read_together(read, settings)
    numbers = [num_samples, int(rank.sizes is None), *map(len, rank.bins), *rank.update_tokens]
    rows = np.array([numbers] if alone else _of_all_ranks(numbers))
    if rows[:, 1].any():
        return rank, None
    bins, tokens = np.split(rows[:, 2:], 2, axis=1)
    fewest_samples = int(rows[:, 0].min()) // len(rank.updates)
    if bins.max() > fewest_samples:
        raise PlanError(
            f"a rank needs {bins.max()} micro-batches in an update, another has {fewest_samples} "
            "samples in it; raise micro_token_budget or give all ranks that many samples"
        )
    return rank, _AllRanks(bins.max(axis=0).tolist(), tokens.mean(axis=0).tolist())


def _read_together(read: Callable[[], _Rank], settings: str) -> _Rank:
    from megapack.ranks.agree import agree, group_device

    return agree(read, device=group_device(), same={"micro-batch settings": settings})


def _of_all_ranks(numbers: list[int]) -> list[list[int]]:
    """The numbers of every rank, by one all-reduce: each rank adds its row to rows of zeros."""
    import torch
    import torch.distributed as dist

    from megapack.ranks.agree import group_device

    shape = (dist.get_world_size(), len(numbers))
    rows = torch.zeros(shape, dtype=torch.int64, device=group_device())
    rows[dist.get_rank()] = rows.new_tensor(numbers)
    dist.all_reduce(rows)
    gathered: list[list[int]] = rows.tolist()
    return gathered


def _budget_plan(rank: _Rank, ranks: _AllRanks, budget: int) -> MicroPlan:
    sizes = rank.sizes
    assert sizes is not None
    order: list[int] = []
    ranges: list[list[Range]] = []
    computed = 0
    for update, fewest, count in zip(rank.updates, rank.bins, ranks.bins, strict=True):
        bins = change_count(sizes, update, fewest, count, budget)
        # Heaviest first on every rank, so that micro-batches which run together cost about as much.
        bins.sort(key=lambda members: (-sizes.cost(members), members))
        ranges.append(list(pairwise(accumulate(map(len, bins), initial=len(order)))))
        order.extend(i for members in bins for i in members)
        computed += sum(sizes.cost(members) for members in bins)
    tokens = sum(sizes.total(i) for i in order)
    plan = MicroPlan(order, ranges, tokens, computed, rank.response_tokens, ranks.mean_tokens)
    logger.info(
        "%d samples in %s micro-batches per update of at most %d tokens, efficiency %.3f (%d real "
        "of %d computed tokens)",
        len(order),
        ranks.bins,
        budget,
        plan.efficiency,
        plan.tokens,
        computed,
    )
    return plan
