"""Per-token results of the last pipeline stage, back to sample order on the ranks that ask.

Every rank holds the plan and all lengths, so every rank knows which rank holds which sample and how
long it is: only the values are sent. Context-parallel ranks hold parts of one sample, with zeros at
the positions of the others: their sum is the whole sample, exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megapack.plan.plan import StepPlan

Scope = Literal["dp_rank", "all"]


def scatter_to_samples(
    local: Mapping[int, Tensor],
    lengths: Sequence[int],
    step: StepPlan,
    *,
    dp_rank: int,
    dp_cp_group: Any,
    cp_group: Any,
    pp_group: Any,
    scope: Scope,
    device: torch.device,
) -> list[Tensor | None]:
    """Collect one quantity in sample order. A collective: every rank calls it with one scope.

    Args:
        local: sample index -> one fp32 value per token; the samples of this data-parallel rank,
            on the last pipeline stage; anything (an empty mapping) on other stages. Of each token
            one context-parallel rank has the value, the others 0.
        lengths: tokens per sample of the whole batch.
        scope: "dp_rank": the samples of this data-parallel rank, on each of its pipeline stages;
            "all": every sample of the step on every rank.

    Returns:
        Per sample of the batch a CPU tensor of its length; None where the step does not hold the
        sample (dropped, or in another step) or the scope leaves it out.
    """
    samples = samples_in_scope(step, dp_rank, scope)
    flat = torch.zeros(sum(lengths[i] for i in samples), dtype=torch.float32, device=device)
    start = 0
    for i in samples:
        if i in local:
            flat[start : start + lengths[i]] = local[i]
        start += lengths[i]
    last = pp_group.size() - 1
    if pp_group.rank() == last:
        dist.all_reduce(flat, group=dp_cp_group if scope == "all" else cp_group)
    if last > 0:
        dist.broadcast(flat, src=dist.get_global_rank(pp_group, last), group=pp_group)
    out: list[Tensor | None] = [None] * len(lengths)
    pieces = flat.cpu().split([lengths[i] for i in samples]) if samples else ()
    for i, piece in zip(samples, pieces, strict=True):
        out[i] = piece
    return out


def sum_metrics(
    local: Mapping[str, Tensor],
    names: Sequence[str],
    *,
    dp_cp_group: Any,
    pp_group: Any,
    device: torch.device,
) -> dict[str, float]:
    """Weighted sums of the last stages, added over data and context-parallel ranks, on every rank.

    Args:
        local: name -> scalar sum over this rank's micro-batches; read on the last stage only.
        names: what to collect, in one order on every rank.
    """
    zero = torch.zeros((), dtype=torch.float64, device=device)
    values = torch.stack([local.get(name, zero).to(torch.float64) for name in names])
    last = pp_group.size() - 1
    if pp_group.rank() == last:
        dist.all_reduce(values, group=dp_cp_group)
    if last > 0:
        dist.broadcast(values, src=dist.get_global_rank(pp_group, last), group=pp_group)
    return dict(zip(names, values.tolist(), strict=True))


def samples_in_scope(step: StepPlan, dp_rank: int, scope: Scope) -> tuple[int, ...]:
    """Sample indices that a scope asks for, ascending."""
    if scope == "all":
        return step.kept_samples
    return tuple(sorted(i for mb in step.ranks[dp_rank] for i in mb.samples))
