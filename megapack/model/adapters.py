"""The adapter of each token of the row that runs, for layers that hold several adapters.

    plan = build_dp_schedule(lengths, adapter_ids=ids, ...)
    output = linear(x) + sum(own(x) * (token_adapters() == k)[:, None, None] for k, own in ...)

Megatron tells linear layers nothing about a row. So the adapter of the schedule does, before each
forward and each backward, whose layers may run their forward again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megapack.base.arrays import Ints
from megapack.errors import ScheduleError
from megapack.rows.packed import PackedRow
from megapack.rows.transfer import moved

_running: list[Tensor] = []
"""Of the row that runs; the autograd engine's threads read it too."""


def token_adapters() -> Tensor:
    """The adapter of each of this rank's tokens in the row that runs, on the row's device.

    Padding counts as the sample before it, so that the tokens of an adapter are side by side. Under
    sequence parallelism tensor-parallel ranks have a part of these tokens each.

    Returns:
        int64 [T]: numbers as `Plan.adapter_of` has them; 0 in padding micro-batches.

    Raises:
        ScheduleError: no row of a plan with `adapter_ids` runs.
    """
    if not _running:
        raise ScheduleError("no row with adapters runs; plan with build_dp_schedule(adapter_ids=)")
    return _running[0]


def begin_row(adapters_T: Tensor | None) -> None:
    """From now on a row with these adapters runs; None: no row."""
    _running[:] = [] if adapters_T is None else [adapters_T]


def row_adapters(row: PackedRow, adapter_of: Ints, device: torch.device) -> Tensor:
    """What `token_adapters` returns for a row.

    Args:
        row: its slice on this rank, on the host.
        adapter_of: `Plan.adapter_of`.
    """
    own = [int(adapter_of[row.samples[branch.samples[0]]]) for branch in row.branches] or [0]
    own += own[-1:] * (len(row.padded_lengths) - len(own))
    whole = torch.repeat_interleave(torch.tensor(own), torch.tensor(row.padded_lengths))
    return moved(whole[row.row_positions_T], device)
