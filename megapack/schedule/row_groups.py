"""Process groups of rows: the ranks that hold the slices of one row.

A row of one DP rank is cut over Megatron's context-parallel group. A row over several DP ranks is
cut over all of their context-parallel ranks, for which Megatron has no group. Megatron's group over
dp and cp numbers its ranks by cp, then by dp, so such a row has consecutive ranks of it: with cp=2,
DP ranks 2 and 3 are its ranks 4, 5, 6 and 7.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megapack.errors import ConfigError
from megapack.layout import Layout
from megapack.plan.plan import MicroBatch
from megapack.ranks.groups import connecting
from megapack.rows.packed import PackedRow

# Groups of a process by Megatron's group over dp and cp and by cp, then by number of slices; None
# where this rank is in no group of that size. The adapters of actor, critic and reference share
# them: NCCL communicators take memory of the GPU.
_MADE: dict[tuple[Any, int], dict[int, Any]] = {}


class RowGroups:
    """The groups of this rank's rows.

    Args:
        layout: that of the plans.
        cp: Megatron's context-parallel group of this rank.
        dp_cp: Megatron's group over data- and context-parallel ranks.
    """

    def __init__(self, layout: Layout, *, cp: Any, dp_cp: Any) -> None:
        self._layout = layout
        self._dp_cp = dp_cp
        # By number of slices; see `_MADE`.
        self._groups: dict[int, Any] = {layout.cp: cp}

    def of(self, row: PackedRow) -> Any:
        """The group of a row's slices."""
        return self._groups[row.num_slices]

    def routing(self, row: PackedRow) -> tuple[Any, ...]:
        """The groups whose ranks have other tokens of the row in their routers."""
        if row.num_slices == self._layout.cp:
            return (parallel_state.get_tensor_and_context_parallel_group(),)
        return (parallel_state.get_tensor_model_parallel_group(), self.of(row))

    def slice_of(self, micro_batch: MicroBatch, dp_rank: int) -> tuple[int, int]:
        """The number of a row's slices, and which of them this rank holds."""
        cp = self._layout.cp
        width = micro_batch.width
        cp_rank = self._groups[cp].rank()
        return cp * width, dp_rank % width * cp + cp_rank

    def make(self, widths: Iterable[int], device: torch.device) -> None:
        """Make the groups of rows over so many DP ranks, unless the process has them.

        Collective of all ranks, which give the same widths: those of a step. With dp=128 and rows
        over 2 ranks a GPU has one communicator for them, not the seven of 2, 4, ... 128 ranks.
        Every rank takes part in making every group, in the same order, since torch numbers groups
        by those that a rank has seen. Then each rank uses its own once, the smallest first: NCCL
        makes its communicators at the first use.

        Raises:
            ScheduleError: a group cannot be made; the message names its ranks.
        """
        cp = self._layout.cp
        made = _MADE.setdefault((self._dp_cp, cp), {})
        missing = sorted({width * cp for width in widths} - {cp, *made})
        if missing:
            # NCCL asks CUDA for memory. In a later step torch may hold what is free.
            torch.cuda.empty_cache()
            every: list[list[int]] = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(every, self._all_ranks())
            new = {size: _make_size(size, every) for size in missing}
            for group in new.values():
                if group is not None:
                    with _connecting(dist.get_process_group_ranks(group)):
                        dist.all_reduce(torch.zeros(1, device=device), group=group)
            made |= new
        self._groups |= made

    def check(self, dp_rank: int) -> None:
        """Raise ConfigError unless the ranks of `dp_cp` are numbered by cp, then by dp."""
        cp = self._layout.cp
        ranks = self._all_ranks()[dp_rank * cp : (dp_rank + 1) * cp]
        own = dist.get_process_group_ranks(self._groups[cp])
        if ranks != own:
            raise ConfigError(
                f"context_parallel='dynamic': Megatron's context-parallel ranks are {own}, not "
                f"{ranks}, the consecutive ones of its group over dp and cp; initialize it with cp "
                "before dp in `order`, as by default"
            )

    def _all_ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self._dp_cp)


def _make_size(size: int, every: Sequence[Sequence[int]]) -> Any:
    """Make all groups of one size; returns this rank's, None if it is in none.

    Args:
        every: the ranks of each rank's group over dp and cp.
    """
    own = None
    for stage in sorted({tuple(ranks) for ranks in every}):
        for first in range(0, len(stage) - size + 1, size):
            ranks = stage[first : first + size]
            with _connecting(ranks):
                group = dist.new_group(list(ranks), group_desc="megapack rows")
            if dist.get_rank() in ranks:
                own = group
    return own


def _connecting(ranks: Sequence[int]) -> contextlib.AbstractContextManager[None]:
    return connecting(ranks, "the ranks that share rows", "plan with context_parallel='fixed'")


_replica_groups: list[tuple[Any, Any, Any]] = []


def replica_group() -> Any:
    """A gloo group of the tensor, context and pipeline-parallel ranks of this model replica.

    The first call with Megatron's groups is a collective of all ranks.
    """
    default = dist.distributed_c10d._get_default_group()
    model = parallel_state.get_model_parallel_group()
    known = _replica_groups[0] if _replica_groups else (None, None, None)
    if known[0] is not default or known[1] is not model:
        replicas: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(replicas, parallel_state.get_data_parallel_rank())
        members = [
            [rank for rank, replica in enumerate(replicas) if replica == one]
            for one in sorted(set(replicas))
        ]
        group, _ = dist.new_subgroups_by_enumeration(members, backend="gloo")  # type: ignore[no-untyped-call]
        _replica_groups[:] = [(default, model, group)]
    return _replica_groups[0][2]
