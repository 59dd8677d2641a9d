"""Sums over samples at the response positions of a row, for losses that see whole samples.

A row's positions lie over context-parallel ranks, so a sum over a sample is a sum over them too.
Shape suffixes: R response positions on this rank, n samples of the row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megapack.rows.packed import PackedRow


@dataclass(frozen=True, kw_only=True)
class Segments:
    """The samples of a row, as an objective with `needs_segments` sees them.

    With two samples of two and three response tokens:

    >>> segments = Segments(
    ...     sample_of_R=torch.tensor([0, 0, 1, 1, 1]), set_of_n=torch.tensor([0, 1])
    ... )
    >>> segments.sum(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
    tensor([ 3., 12.])
    >>> segments.spread(torch.tensor([7.0, 8.0]))
    tensor([7., 7., 8., 8., 8.])
    """

    sample_of_R: Tensor
    """int64: index of each position's sample among the row's samples."""
    set_of_n: Tensor
    """int64 [n]: which of the row's colocated sets a sample is in, 0 to n - 1."""
    fields: Mapping[str, Tensor] = field(default_factory=dict)
    """Fields of one number per sample, [n]; there for samples without response tokens too."""
    scores_n: Tensor | None = None
    """fp32: what a value head gives for each sample's last token; None without one."""
    cp_group: Any = None
    """Ranks that hold the row's other positions; None for one rank."""

    @property
    def num_samples(self) -> int:
        """n; 0 in a padding micro-batch."""
        return self.set_of_n.numel()

    @cached_property
    def num_tokens_n(self) -> Tensor:
        """float32 [n]: response tokens of each sample, over all context-parallel ranks."""
        return self.sum(torch.ones_like(self.sample_of_R, dtype=torch.float32))

    def sum(self, values_R: Tensor) -> Tensor:
        """Sum over each sample's response tokens, [n]; a collective of the CP group."""
        return sum_by_sample(values_R, self.sample_of_R, self.num_samples, self.cp_group)

    def mean(self, values_R: Tensor) -> Tensor:
        """Mean over each sample's response tokens, [n]; 0 for a sample without any."""
        return self.sum(values_R) / self.num_tokens_n.clamp(min=1)

    def spread(self, values_n: Tensor) -> Tensor:
        """Each sample's value at its response positions, [R]."""
        return values_n[self.sample_of_R]

    def sum_sets(self, values_n: Tensor) -> Tensor:
        """For each sample the sum over the samples of its colocated set, [n]."""
        return torch.zeros_like(values_n).index_add(0, self.set_of_n, values_n)[self.set_of_n]


def sum_by_sample(
    values_R: Tensor, sample_of_R: Tensor, num_samples: int, cp_group: Any = None
) -> Tensor:
    """Sums of the values of each sample, over all context-parallel ranks, differentiable.

    The loss of a step is the sum of what every rank computes from these sums, so the gradient of a
    sum is the sum of what every rank finds for it: all-reduce forward, all-reduce backward.

    Returns:
        [num_samples], the same on every rank of the group.
    """
    sums = values_R.new_zeros(num_samples).index_add(0, sample_of_R, values_R)
    # A padding micro-batch is one on every rank of the group.
    if cp_group is None or cp_group.size() == 1 or num_samples == 0:
        return sums
    return _AllReduce.apply(sums, cp_group)  # type: ignore[no-any-return, no-untyped-call]


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sums: Tensor, group: Any) -> Tensor:
        ctx.group = group
        # Without a copy autograd would take the input as changed in place.
        out = sums.clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def row_segments(
    row: PackedRow, positions_R: Tensor, *, scores_n: Tensor | None = None, cp_group: Any = None
) -> Segments:
    """The segments of a row at some of its positions."""
    return Segments(
        sample_of_R=row.sample_of_T[positions_R],
        set_of_n=row.set_of_n,
        fields=row.sample_fields,
        scores_n=scores_n,
        cp_group=cp_group,
    )


def no_segments() -> Segments:
    """Of a row without samples: to ask an objective for the names of its metrics."""
    none = torch.zeros(0, dtype=torch.int64)
    # Any per-sample field may be asked for.
    return Segments(sample_of_R=none, set_of_n=none, fields=_EmptyFields(), scores_n=torch.zeros(0))


class _EmptyFields(dict[str, Tensor]):
    def __missing__(self, name: str) -> Tensor:
        return torch.zeros(0)
