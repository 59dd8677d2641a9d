"""What hosts whose ranks plan their own samples share: rows of one rank, and a count for all.

Such a host has dealt its samples to DP ranks already. Each rank finds rows for its own, the ranks
agree on M, and each splits rows until it has M of them.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from megapack.base.arrays import Floats, Ints
from megapack.cost.model import CostModel
from megapack.dp_schedule import build_dp_schedule
from megapack.layout import Layout
from megapack.planner.counts import split_heaviest
from megapack.policy import Oversize, Policy

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

_LOG = logging.getLogger(__name__)

Rows = list[list[int]]
"""Per micro-batch the indices of its samples, ascending."""


@dataclasses.dataclass(frozen=True)
class Need:
    """What one rank brings to the choice of M."""

    count: int
    """Micro-batches that it needs at least."""
    room: int
    """Micro-batches that its samples can fill."""
    longest: int
    """Tokens of its longest item, which no split makes shorter."""


class Needy(Protocol):
    """One rank's samples, read and packed."""

    @property
    def need(self) -> Need: ...


R = TypeVar("R", bound=Needy)


def agree_on_need(
    read: Callable[[], R], settings: str, group: dist.ProcessGroup | None
) -> tuple[R, Need]:
    """What `read` makes of this rank's samples, and the need of all ranks of the group.

    Collective where torch.distributed is initialized: every rank of the group calls it.

    Args:
        read: local work; a rank's need is known when it returns.
        settings: equal on all ranks.
        group: None for all ranks.

    Returns:
        rank: what `read` returned.
        need: the largest count, the least room and the longest item of any rank.

    Raises:
        ScheduleError: on every rank, where `read` failed on some or settings differ; see
            `consensus.agree`.
    """
    import torch
    import torch.distributed as dist

    from megapack.ranks.agree import agree

    if not dist.is_initialized():
        rank = read()
        return rank, rank.need
    device = _device_of(group)
    rank = agree(read, device=device, same={"batching options": settings}, group=group)
    mine = [rank.need.count, -rank.need.room, rank.need.longest]
    found = torch.tensor(mine, dtype=torch.int64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    count, minus_room, longest = found.tolist()
    return rank, Need(count, -minus_room, longest)


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Where the group's backend takes its tensors."""
    import torch
    import torch.distributed as dist

    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or "gloo" in str(dist.get_backend(group)):
        return torch.device("cpu")
    return accelerator


def plan_rank(
    lengths: Ints,
    max_tokens: int,
    *,
    layout: Layout | None = None,
    cost: CostModel | None = None,
    colocate_ids: Sequence[int] | None = None,
    oversize: Oversize = "alone",
) -> tuple[Rows, int]:
    """One rank's micro-batches by megapack's planner, in the order of the pipeline.

    Args:
        lengths: int64 [n]; a sample without tokens counts as one.
        max_tokens: budget of a micro-batch before CP.
        layout: the job's; None: rows are filled to `max_tokens` without alignment.
        cost: None balances tokens.
        colocate_ids, oversize: as in `build_dp_schedule` and `Policy`.

    Returns:
        rows: without padding micro-batches, so there may be fewer than
        count: the M that the planner chose.
    """
    # The other ranks are not this one's to plan, and experts do not change what it packs.
    layout = dataclasses.replace(layout, dp=1, ep=1) if layout is not None else Layout()
    plan = build_dp_schedule(
        np.maximum(lengths, 1),
        layout=layout,
        max_tokens_per_gpu=max_tokens // layout.cp,
        colocate_ids=colocate_ids,
        cost=cost,
        policy=Policy(oversize=oversize),
    )
    micro_batches = plan.steps[0].ranks[0]
    return [list(mb.samples) for mb in micro_batches if mb.samples], len(micro_batches)


def split_rows(rows: Rows, count: int, work: Ints | Floats) -> Rows:
    """Rows split, heaviest first, until there are `count` or only single items are left.

    Args:
        rows: every item in one of them.
        work: [items].
    """
    if len(rows) >= count:
        return rows
    row_of = np.empty(work.size, dtype=np.int64)
    for number, row in enumerate(rows):
        row_of[row] = number
    row_of, num_rows = split_heaviest(row_of, len(rows), count, work.astype(float))
    return [np.flatnonzero(row_of == number).tolist() for number in range(num_rows)]


def small_at_ends(rows: Rows, work: Ints | Floats) -> Rows:
    """Heaviest in the middle, lighter ones before and after it in turn.

    A pipeline waits for its first micro-batch while it fills and for its last while it drains.
    """
    falling = sorted(rows, key=lambda row: (-work[row].sum(), -row[0]))
    return falling[::2][::-1] + falling[1::2]


@cache
def log_budget(host: str, max_tokens: int, cp: int | None) -> None:
    """Say once how a budget was read; cp=None where the host does not tell it."""
    per_gpu = f"{max_tokens // cp} per GPU with cp={cp}" if cp else "before CP"
    _LOG.info("%s: budget of %d tokens per micro-batch, %s", host, max_tokens, per_gpu)
