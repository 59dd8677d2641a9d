"""AReaL: the micro-batches and the count that ranks agree on, with rows within the budget.

Without a layout they are those of AReaL's own packing algorithms. Checked against AReaL 1.0.4 and
2.0.0.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from megapack.errors import HostRuntimeError
from megapack.hosts.shared.families import callers_data, real_tokens
from megapack.hosts.shared.options import HostOptions, PlannerOptions
from megapack.hosts.shared.rank_items import RankItems
from megapack.hosts.shared.rank_rows import Rows, agree_on_need

if TYPE_CHECKING:
    import torch.distributed as dist

_OPTIONS = HostOptions(PlannerOptions())
configure = _OPTIONS.configure


def allocate_balanced_mbs_synced(
    mb_spec: Any, lens: Sequence[int], group: dist.ProcessGroup | None = None
) -> Rows:
    """Pack a rank's sequences into as many micro-batches as every other rank of the group has.

    Collective over `group`; None is all ranks. AReaL packs again until all ranks have the same
    count, and a rank that cannot leaves the others waiting; here all agree once, and a rank with
    fewer micro-batches packs once more or splits its heaviest ones.

    Args:
        mb_spec: AReaL's MicroBatchSpec.
        lens: tokens of each sequence, or of each `granularity` of them.

    Returns:
        The indices of each micro-batch, ascending; micro-batches by their first index, or with a
        configured layout in the order in which the pipeline runs them.

    Raises:
        HostRuntimeError: on every rank, if one has a sequence over the budget or too few sequences.
        ScheduleError: on every rank, if settings differ.
    """
    options = _OPTIONS.current
    capacity = int(mb_spec.max_tokens_per_mb)
    divisor = int(mb_spec.n_mbs_divisor or 1)
    token_ids = callers_data(lens, _tokens_of)[1] if options.share_prefixes else None

    def read() -> RankItems:
        return RankItems(
            lengths=np.asarray(lens, dtype=np.int64),
            max_tokens=capacity,
            budget="max_tokens_per_mb",
            partition=functools.partial(_partition, mb_spec),
            options=options,
            step=divisor,
            least=max(int(mb_spec.n_mbs or 1), divisor),
            token_ids=token_ids,
            work_of=lambda tokens: tokens,
            error=HostRuntimeError,
        )

    settings = f"{capacity} {mb_spec.n_mbs} {divisor} {options}"
    rank, need = agree_on_need(read, settings, group)
    rows = rank.rows(rank.shared_count(need))
    return rows if options.layout is not None else sorted(sorted(row) for row in rows)


def _partition(mb_spec: Any, tokens: list[int], count: int) -> Rows:
    """AReaL's own packing into `count` micro-batches or more; [] where it finds none."""
    from areal.utils.seqpack import get_allocate_fn

    allocate = get_allocate_fn(getattr(mb_spec, "packing_algorithm", "ffd"))
    try:
        rows = allocate(tokens, mb_spec.max_tokens_per_mb, count, mb_spec.n_mbs_divisor or 1)
    except RuntimeError:
        return []
    return [[int(i) for i in row] for row in rows]


def _tokens_of(data: dict[str, Any]) -> Sequence[Any] | None:
    """The token ids of AReaL's padded batch."""
    ids, mask = data.get("input_ids"), data.get("attention_mask")
    return None if ids is None or mask is None else real_tokens(ids, mask)
