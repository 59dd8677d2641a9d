"""Families of a host's samples: which of them belong in one row.

With `share_prefixes` of `megapack.schedule.PlannedSchedule`, a row runs what its own samples have
in common once. So samples with a common beginning, such as the answers to one prompt, are packed as
one item where the budget allows it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np

from megapack.base.arrays import Ints
from megapack.dp_schedule import build_dp_schedule
from megapack.errors import PlanError
from megapack.layout import Layout
from megapack.plan.plan import Plan
from megapack.prefixes import SharedPrefixes, worthwhile

if TYPE_CHECKING:
    import torch


def callers_data(
    lengths: Sequence[int], read: Callable[[dict[str, Any]], Sequence[Any] | None]
) -> tuple[dict[str, Any], Sequence[Any] | None]:
    """The batch that a host's planner is called for, and its token ids; {} and None if not found.

    slime, miles and AReaL give their planner lengths, out of a function that has the samples in its
    local variable `data`. This is read, because slime's is a method of a Ray actor, whose class
    cannot be patched.

    Args:
        lengths: those that the planner got; samples of other lengths are not taken.
        read: finds the ids of each sample in the host's dict.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("megapack."):
        frame = frame.f_back
    data = None if frame is None else frame.f_locals.get("data")
    tokens = read(data) if isinstance(data, dict) else None
    return (data, tokens) if data and has_lengths(tokens, lengths) else ({}, None)


def has_lengths(token_ids: Sequence[Any] | None, lengths: Sequence[int] | Ints) -> bool:
    """Whether these are ids of samples of these lengths."""
    return token_ids is not None and [len(ids) for ids in token_ids] == list(lengths)


def real_tokens(ids_BS: torch.Tensor, mask_BS: torch.Tensor) -> list[Ints]:
    """The token ids of each sample where its mask is not 0, on the host."""
    ids = ids_BS.cpu().numpy()
    masks = mask_BS.cpu().numpy().astype(bool)
    return [row[mask] for row, mask in zip(ids, masks, strict=True)]


def family_parts(
    token_ids: Sequence[Any],
    lengths: Sequence[int] | Ints,
    layout: Layout | None,
    max_tokens: int,
    *,
    num_rows: int = 1,
    step_of: Sequence[int] | None = None,
) -> list[int] | None:
    """A number per sample, equal for those that belong in one row; None if none share anything.

    A family is cut into parts of nearly equal size that a row can hold, in the order of its tree.

    Args:
        lengths: tokens of each sample, with the host's padding.
        layout: None does not align samples.
        max_tokens: padded tokens of a row, each copy of a prefix counted.
        num_rows: rows of a step; a part is not larger than such a row on average.
        step_of: the step of each sample, 0 and up; samples of different steps do not share. None:
            all are in one.

    >>> family_parts([[5, 6, 7, 8], [1, 2], [5, 6, 7, 9]], [4, 2, 4], None, 8)
    [0, 1, 0]
    """
    if not len(token_ids):
        return None
    layout = layout or Layout()
    steps = [0] * len(token_ids) if step_of is None else step_of
    aligned = layout.aligned_sample_tokens(np.asarray(lengths))
    prefixes = worthwhile(SharedPrefixes.from_samples(token_ids), aligned, layout)
    if not prefixes.order:
        return None
    share = int(aligned.sum()) // (num_rows * (max(steps) + 1))
    most = max(min(max_tokens, share), 1)
    families: dict[tuple[int, int], list[int]] = {}
    tree = -1
    for sample, common in zip(prefixes.order, prefixes.common, strict=True):
        tree += common == 0
        families.setdefault((steps[sample], tree), []).append(sample)
    part_of = list(range(len(token_ids)))
    for members in families.values():
        total = int(aligned[members].sum())
        even = total / -(-total // most)
        first, held = members[0], 0
        for sample in members:
            tokens = int(aligned[sample])
            if held + tokens > most or held + tokens / 2 > even:
                first, held = sample, 0
            part_of[sample] = first
            held += tokens
    return part_of


def members_of(part_of: Sequence[int]) -> list[list[int]]:
    """The samples of each part, ascending.

    >>> members_of([0, 1, 0])
    [[0, 2], [1]]
    """
    members: dict[int, list[int]] = {}
    for sample, part in enumerate(part_of):
        members.setdefault(part, []).append(sample)
    return list(members.values())


def plan_families(
    token_ids: Sequence[Any],
    lengths: Sequence[int] | Ints,
    step_of: Sequence[int],
    *,
    layout: Layout,
    max_tokens_per_gpu: int,
    **settings: Any,
) -> Plan | None:
    """A plan for all ranks with the parts of families in one row each.

    Args:
        settings: others of `build_dp_schedule`.

    Returns:
        None if no samples share anything, or parts of families fill no step as it must be.
    """
    parts = family_parts(
        token_ids,
        lengths,
        layout,
        max_tokens_per_gpu * layout.cp,
        num_rows=layout.dp * layout.next_legal_count(1),
        step_of=step_of,
    )
    if parts is None:
        return None
    # Families lie across rollouts. So a step is one rollout, which is planned whole.
    with contextlib.suppress(PlanError):
        return build_dp_schedule(
            lengths,
            layout=layout,
            max_tokens_per_gpu=max_tokens_per_gpu,
            rollout_ids=step_of,
            colocate_ids=parts,
            global_batch_size=1,
            **settings,
        )
    return None
