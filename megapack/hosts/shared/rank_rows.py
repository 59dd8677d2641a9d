"""Rows of one rank and an M for all ranks, for hosts whose ranks plan their own samples.

Such a host has already distributed its samples over DP ranks. Each rank packs its samples into
rows, the ranks agree on M, and each rank splits rows until it has M of them.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import astuple
from functools import cache
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from megapack.base.arrays import Floats, Ints
from megapack.cost.model import CostModel
from megapack.dp_schedule import build_dp_schedule
from megapack.hosts.shared.images import Patches, with_images
from megapack.layout import Layout
from megapack.planner.counts import split_heaviest
from megapack.planner.items import members_by_row
from megapack.policy import Oversize, Policy

if TYPE_CHECKING:
    import torch.distributed as dist

logger = logging.getLogger(__name__)

Rows = list[list[int]]
"""The sample indices of each micro-batch, ascending."""


@dataclasses.dataclass(frozen=True)
class Need:
    """The bounds that one rank's samples set on M."""

    count: int
    """The least number of micro-batches that the rank needs."""
    room: int
    """The largest number of micro-batches that its samples can fill."""
    longest: int
    """Tokens of its longest item, which no split makes shorter."""


class HasNeed(Protocol):
    """One rank's samples, read and packed."""

    @property
    def need(self) -> Need: ...


R = TypeVar("R", bound=HasNeed)
S = TypeVar("S")


def agree_on_need(
    read: Callable[[], R], settings: str, group: dist.ProcessGroup | None
) -> tuple[R, Need]:
    """Read this rank's samples, and combine the needs of all ranks of the group.

    Returns:
        rank: what `read` returned.
        need: the largest count, the least room and the longest item of any rank.

    Raises:
        ScheduleError: on every rank; see `agree_on_numbers`.
    """
    rank, numbers = agree_on_numbers(read, lambda rank: astuple(rank.need), settings, group)
    return rank, Need(*map(int, (numbers[:, 0].max(), numbers[:, 1].min(), numbers[:, 2].max())))


def agree_on_numbers(
    read: Callable[[], S],
    numbers_of: Callable[[S], Sequence[int]],
    settings: str,
    group: dist.ProcessGroup | None = None,
) -> tuple[S, Ints]:
    """Read this rank's samples, and learn some numbers of all ranks of the group.

    Collective if torch.distributed is initialized: every rank of the group calls it.

    Args:
        read: reads and packs this rank's samples, without collectives.
        numbers_of: this rank's numbers, equally many on all ranks.
        settings: equal on all ranks.
        group: None for all ranks.

    Returns:
        rank: what `read` returned.
        numbers: int64 [ranks, numbers].

    Raises:
        ScheduleError: on every rank, if `read` failed on one or settings differ; see
            `ranks.agree.agree`.
    """
    # If torch.distributed was never imported, no process group can exist.
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        rank = read()
        return rank, np.array([numbers_of(rank)], dtype=np.int64)
    import torch

    from megapack.ranks.agree import agree, group_device

    device = group_device(group)
    rank = agree(read, device=device, same={"batching options": settings}, group=group)
    own = torch.tensor(numbers_of(rank), dtype=torch.int64, device=device)
    # One all-reduce: each rank adds its row to rows of zeros.
    rows = own.new_zeros((dist.get_world_size(group), len(own)))
    rows[dist.get_rank(group)] = own
    dist.all_reduce(rows, group=group)
    return rank, np.array(rows.tolist(), dtype=np.int64)


def plan_rank(
    lengths: Ints,
    max_tokens: int,
    *,
    layout: Layout | None = None,
    cost: CostModel | None = None,
    colocate_ids: Sequence[int] | None = None,
    patches: Patches | None = None,
    oversize: Oversize = "alone",
) -> tuple[Rows, int]:
    """Plan one rank's micro-batches, in the order in which the pipeline runs them.

    Args:
        lengths: int64 [n]; a sample without tokens counts as one token.
        max_tokens: budget of a micro-batch before CP.
        layout: the job's; None fills rows to `max_tokens` without alignment.
        cost: see `build_dp_schedule`.
        patches: of the samples' images, which are encoded in the samples' rows.
        colocate_ids, oversize: as in `build_dp_schedule` and `Policy`.

    Returns:
        rows: without padding micro-batches, so there may be fewer than `count`.
        count: the M that the planner chose.
    """
    # This plans one rank (dp=1), and expert parallelism does not change what is packed.
    layout = Layout() if layout is None else dataclasses.replace(layout, dp=1, ep=1)
    lengths = np.maximum(lengths, 1)
    policy = for_step(Policy(oversize=oversize), lengths.size)
    plan = build_dp_schedule(
        lengths,
        max_tokens_per_gpu=max_tokens // layout.cp,
        colocate_ids=colocate_ids,
        **with_images(patches, lengths, layout=layout, cost=cost, policy=policy),
    )
    micro_batches = plan.steps[0].ranks[0]
    return [list(mb.samples) for mb in micro_batches if mb.samples], len(micro_batches)


def for_step(policy: Policy, num_samples: int) -> Policy:
    """The policy for a step of so many samples, which is planned while its ranks wait.

    Of few samples a search soon finds nothing more: 12 have the same seconds after 256 simulations
    as after 2,048, which take 5 ms longer.
    """
    return dataclasses.replace(policy, search=min(policy.search, 2 * num_samples**2))


def split_rows(rows: Rows, count: int, work: Ints | Floats) -> Rows:
    """Split rows, heaviest first, until there are `count` of them or each has one item.

    Args:
        rows: every item is in one row.
        work: [items].
    """
    if len(rows) >= count:
        return rows
    row_of = np.empty(work.size, dtype=np.int64)
    for number, row in enumerate(rows):
        row_of[row] = number
    return rows_of(*split_heaviest(row_of, len(rows), count, work.astype(float)))


def rows_of(row_of: Ints, num_rows: int) -> Rows:
    """The items of each row, from the row of each item; [0, 1, 0] becomes [0, 2] and [1]."""
    return [items.tolist() for items in members_by_row(row_of, num_rows)]


def small_at_ends(rows: Rows, work: Ints | Floats) -> Rows:
    """Order rows with the heaviest in the middle and lighter ones on both sides in turn.

    Work 5, 4, 3, 2, 1 becomes 1, 3, 5, 4, 2. A pipeline waits for its first micro-batch while it
    fills and for its last while it drains.
    """
    heaviest_first = sorted(rows, key=lambda row: (-work[row].sum(), -row[0]))
    return heaviest_first[::2][::-1] + heaviest_first[1::2]


@cache
def log_own(host: str, why: str) -> None:
    """Say once that a host's own micro-batches stay, though its patch is on, and what to set."""
    logger.warning("%s: micro-batches are %s's own, not planned: %s", host, host, why)


@cache
def log_budget(host: str, max_tokens: int, cp: int | None) -> None:
    """Log once how a budget is read; cp is None if the host does not give it."""
    per_gpu = f"{max_tokens // cp} per GPU with cp={cp}" if cp else "before CP"
    logger.info("%s: budget of %d tokens per micro-batch, %s", host, max_tokens, per_gpu)
