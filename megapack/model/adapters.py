"""The adapter of each token of the row that runs, for layers that hold several adapters.

Megatron tells linear layers nothing about a row. So it is told here before each forward, and before
each backward, in which layers may run their forward again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megapack.errors import ScheduleError, brief
from megapack.rows.packed import PackedRow
from megapack.rows.transfer import moved

_running: list[PackedRow | None] = [None]
"""The row that runs; the autograd engine's threads read it too."""


def token_adapters(ids: Sequence[int | str]) -> Tensor:
    """The adapter of each of this rank's tokens in the row that runs, on the row's device.

        index_T = token_adapters(["math", "code"])
        output = linear(x) + (index_T == 0)[:, None, None] * math(x)

    Padding counts as the sample before it, so that the tokens of an adapter are side by side;
    adapters ascend, integers before strings, but for that of a piece, which is first. A layer that
    takes numbers of tokens and no indices, such as Megatron-Bridge's `MultiLoRA`, gives the first
    tokens to its first slot: before `torch.bincount(index_T, minlength=len(ids))` check that
    `(index_T.diff() >= 0).all()`, which needs slots that ascend too, and rows without pieces. Under
    sequence parallelism each tensor-parallel rank has a part of these tokens.

    Args:
        ids: the adapters of a layer.

    Returns:
        int64 [T]: indices into `ids`; 0 in padding micro-batches.

    Raises:
        ScheduleError: no row of a plan with `adapter_ids` runs, or it has another adapter.
    """
    row = _running[0]
    if row is None or row.adapters_T is None:
        raise ScheduleError("no row with adapters runs; plan with build_dp_schedule(adapter_ids=)")
    unknown = [own for own in row.adapters if own not in ids]
    if unknown:
        names = f"adapters {brief(unknown)} of a row are not in {brief(ids)}"
        raise ScheduleError(f"{names}; give a layer all")
    index = torch.tensor([ids.index(own) for own in row.adapters] or [0])
    return moved(index, row.adapters_T.device)[row.adapters_T]


def begin_row(row: PackedRow | None) -> None:
    """From now on this row runs; None: no row."""
    _running[0] = row
