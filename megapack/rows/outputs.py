"""Per-token results of the last pipeline stage, in sample order on the ranks of a scope.

Every rank knows the plan and all lengths, and so which rank holds which sample: only values are
sent. Each context-parallel rank holds some tokens of a sample and zeros for the rest, so the sum
over these ranks is exactly the whole sample.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megapack.plan.plan import StepPlan
from megapack.rows.schedule_pass import MAXIMUM

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
    """Collect one quantity in sample order. Collective: all ranks call it with the same scope.

    With lengths [3, 1, 2], samples 2 and 0 on this data-parallel rank, cp=2 and scope "dp_rank":

        local of CP rank 0   {2: [5, 0], 0: [1, 0, 0]}
        local of CP rank 1   {2: [0, 6], 0: [0, 2, 3]}
        returned on both     [[1, 2, 3], None, [5, 6]]

    Args:
        local: sample index -> one fp32 value per token, for the samples of this data-parallel rank.
            Each token has its value on one context-parallel rank and 0 on the others. Read on the
            last pipeline stage only.
        lengths: tokens per sample of the whole batch.
        scope: "dp_rank": the samples of this data-parallel rank, on each of its pipeline stages;
            "all": every sample of the step on every rank.

    Returns:
        Per sample of the batch a CPU tensor of its length; None for samples that are not in the
        step (dropped, or in another step) or not in the scope.
    """

    def collect(samples: Sequence[int], is_spread: bool) -> Tensor:
        flat = _concatenated(local, samples, lengths, device)
        _reduce_on_all_stages(flat, dp_cp_group if is_spread else cp_group, pp_group)
        return flat

    return in_sample_order(collect, lengths, step, dp_rank, scope)


def in_sample_order(
    collect: Callable[[Sequence[int], bool], Tensor],
    lengths: Sequence[int],
    step: StepPlan,
    dp_rank: int,
    scope: Scope,
) -> list[Tensor | None]:
    """Per sample of the batch its values; None for samples that are not in the scope.

    Args:
        collect: the values of some samples, one after the other, and whether they are added over
            all DP ranks; a collective.
    """
    out: list[Tensor | None] = [None] * len(lengths)
    members = set(samples_in_scope(step, dp_rank, scope))
    for samples, is_spread in _reduced_samples(step, dp_rank, scope):
        values = collect(samples, is_spread).cpu()
        for i, value in zip(samples, _by_sample(values, samples, lengths), strict=True):
            out[i] = value if i in members else None
    return out


def reduce_metrics(
    local: Mapping[str, Tensor],
    names: Sequence[str],
    *,
    dp_cp_group: Any,
    pp_group: Any,
    device: torch.device,
) -> dict[str, float]:
    """Weighted sums of the last stages, added over data- and context-parallel ranks, on every rank.

    Of metrics whose name ends with `MAXIMUM` the maximum over these ranks is taken.

    Args:
        local: name -> scalar sum over this rank's micro-batches; read on the last stage only.
        names: the metrics to collect, in the same order on every rank.
    """
    found: dict[str, float] = {}
    for ending, start, op in (
        (False, 0.0, dist.ReduceOp.SUM),
        (True, -math.inf, dist.ReduceOp.MAX),
    ):
        own = [name for name in names if name.endswith(MAXIMUM) == ending]
        if not own:
            continue
        absent = torch.full((), start, dtype=torch.float64, device=device)
        values = torch.stack([local.get(name, absent).to(torch.float64) for name in own])
        _reduce_on_all_stages(values, dp_cp_group, pp_group, op)
        found |= zip(own, values.tolist(), strict=True)
    return {name: found[name] for name in names}


def samples_in_scope(step: StepPlan, dp_rank: int, scope: Scope) -> tuple[int, ...]:
    """Sample indices in a scope, ascending.

    >>> from megapack import Layout, build_dp_schedule
    >>> plan = build_dp_schedule([4, 1, 2, 3], layout=Layout(dp=2), max_tokens_per_gpu=5)
    >>> [[mb.samples for mb in rank] for rank in plan.steps[0].ranks]
    [[(0, 1)], [(2, 3)]]
    >>> samples_in_scope(plan.steps[0], 0, "dp_rank")
    (0, 1)
    >>> samples_in_scope(plan.steps[0], 0, "all")
    (0, 1, 2, 3)
    """
    if scope == "all":
        return step.kept_samples
    return tuple(
        sorted(i for micro_batch in step.ranks[dp_rank] for i in micro_batch.begun_samples)
    )


def _reduced_samples(
    step: StepPlan, dp_rank: int, scope: Scope
) -> list[tuple[tuple[int, ...], bool]]:
    """The samples whose values are added over ranks for a scope, and whether over all DP ranks.

    Samples of one DP rank are added over its context-parallel ranks. Several DP ranks have parts of
    a sample that lies over them. All ranks take part in the sum over DP ranks, also those that have
    no part of such a sample.
    """
    if scope == "all":
        return [(step.kept_samples, True)]
    own = [i for mb in step.ranks[dp_rank] if mb.width == 1 for i in mb.begun_samples]
    spread = [i for mb in step.microbatches if mb.width > 1 for i in mb.begun_samples]
    groups = [(tuple(sorted(own)), False)]
    return [*groups, (tuple(sorted(spread)), True)] if spread else groups


def _concatenated(
    local: Mapping[int, Tensor],
    samples: Sequence[int],
    lengths: Sequence[int],
    device: torch.device,
) -> Tensor:
    """The values of `samples` one after the other, 0 for samples that are not in `local`.

    >>> local = {2: torch.tensor([5.0, 6.0])}
    >>> _concatenated(local, [0, 2], [3, 1, 2], torch.device("cpu"))
    tensor([0., 0., 0., 5., 6.])
    """
    pieces = [torch.zeros(0, device=device)]
    for is_local, group in itertools.groupby(samples, key=local.__contains__):
        if is_local:
            pieces += [local[i].reshape(lengths[i]).float() for i in group]
        else:
            pieces.append(torch.zeros(sum(lengths[i] for i in group), device=device))
    # One call instead of a kernel per sample.
    return torch.cat(pieces)


def _by_sample(flat: Tensor, samples: Sequence[int], lengths: Sequence[int]) -> list[Tensor]:
    """The inverse of `_concatenated`: the values of each of `samples`.

    >>> _by_sample(torch.tensor([1.0, 2.0, 3.0, 5.0, 6.0]), [0, 2], [3, 1, 2])
    [tensor([1., 2., 3.]), tensor([5., 6.])]
    """
    pieces = flat.split([lengths[i] for i in samples]) if samples else ()
    # A view would keep the whole batch alive, and be pickled with it.
    return [piece.clone() for piece in pieces]


def _reduce_on_all_stages(
    values: Tensor, group: Any, pp_group: Any, op: Any = dist.ReduceOp.SUM
) -> None:
    """Replace the values by their sum over `group` on the last stage, on every pipeline stage."""
    last = pp_group.size() - 1
    if pp_group.rank() == last:
        dist.all_reduce(values, op=op, group=group)
    if last > 0:
        dist.broadcast(values, src=dist.get_global_rank(pp_group, last), group=pp_group)
