"""Process groups of rows: the ranks that hold the slices of one row.

A row of one DP rank is cut over Megatron's context-parallel group. A row over several DP ranks is
cut over all of their context-parallel ranks, for which Megatron has no group. Megatron's group over
dp and cp numbers its ranks by cp, then by dp, so such a row has consecutive ranks of it: with cp=2,
DP ranks 2 and 3 are its ranks 4, 5, 6 and 7.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megapack.errors import ConfigError, ScheduleError
from megapack.layout import Layout, block_ranks
from megapack.plan.plan import MicroBatch
from megapack.rows.packed import PackedRow

# Groups of a process by Megatron's group over dp and cp, then by their ranks. The adapters of
# actor, critic and reference share them: each NCCL communicator takes memory of the GPU.
_MADE: dict[Any, dict[tuple[int, ...], Any]] = {}


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
        # By number of slices.
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

    def make(self, dp_rank: int, device: torch.device) -> None:
        """Make the groups of rows over 2, 4, 8, ... DP ranks that the process does not have yet.

        Collective of all ranks of `dp_cp`. All ranks make theirs in the same order, the smallest
        first, and use each once: NCCL makes its communicators at the first use.

        Raises:
            ConfigError: Megatron numbers the ranks in another order.
            ScheduleError: a group cannot be made; the message names its ranks.
        """
        layout = self._layout
        made = _MADE.setdefault(self._dp_cp, {})
        for width in layout.widths[1:]:
            block = block_ranks(dp_rank, width)
            num_slices = layout.cp * width
            if num_slices in self._groups or block[-1] >= layout.dp:
                continue
            ranks = self._all_ranks()[block[0] * layout.cp : (block[-1] + 1) * layout.cp]
            if tuple(ranks) not in made:
                made[tuple(ranks)] = _new_group(ranks, block, device)
            self._groups[num_slices] = made[tuple(ranks)]

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


def _new_group(ranks: list[int], block: tuple[int, ...], device: torch.device) -> Any:
    name = f"rows over DP ranks {block[0]} to {block[-1]}"
    try:
        # Only its ranks take part: on dp=64 with 32 ranks per DP rank there are 2,016 such groups.
        group = dist.new_group(ranks, use_local_synchronization=True, group_desc=name)
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    except RuntimeError as error:
        raise ScheduleError(
            f"the group of {name} (ranks {ranks}) cannot be made: {error}; check the connection "
            "between these ranks, or plan with context_parallel='fixed'"
        ) from error
    return group
