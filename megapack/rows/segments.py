"""Sums over samples at the response positions of a row, for losses of whole samples.

With context parallelism the ranks share a sample's positions, so its sum is an all-reduce over
them.

Shape suffixes: R response positions on this rank, n samples of the row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megapack.rows.chain import Link
from megapack.rows.packed import PlacedRow


@dataclass(frozen=True, kw_only=True)
class Segments:
    """The samples of a row, passed to objectives with `needs_segments`.

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
    """int64 [n]: index of each sample's colocated set, 0 to n - 1."""
    fields: Mapping[str, Tensor] = field(default_factory=dict)
    """Fields with one number per sample, [n]; samples without response tokens are included."""
    scores_n: Tensor | None = None
    """fp32 [n]: value of each sample's last token; None without a value head."""
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
        """Sum over each sample's response tokens, [n]; collective in the CP group."""
        return sum_by_sample(values_R, self.sample_of_R, self.num_samples, self.cp_group)

    def mean(self, values_R: Tensor) -> Tensor:
        """Mean over each sample's response tokens, [n]; 0 for a sample without any."""
        return self.sum(values_R) / self.num_tokens_n.clamp(min=1)

    def spread(self, values_n: Tensor) -> Tensor:
        """Each sample's value at its response positions, [R]."""
        return values_n[self.sample_of_R]

    def sum_sets(self, values_n: Tensor) -> Tensor:
        """Sum over the samples of each sample's colocated set, [n]."""
        return torch.zeros_like(values_n).index_add(0, self.set_of_n, values_n)[self.set_of_n]


def sum_by_sample(
    values_R: Tensor, sample_of_R: Tensor, num_samples: int, cp_group: Any = None
) -> Tensor:
    """Sum of each sample's values over all context-parallel ranks; differentiable.

    Every rank computes a part of the step's loss from these sums, and the loss is the total of the
    parts. So the gradient of a sum is the total of the ranks' gradients: all-reduce forward,
    all-reduce backward.

    Returns:
        [num_samples], the same on every rank of the group.
    """
    sums = values_R.new_zeros(num_samples).index_add(0, sample_of_R, values_R)
    # A padding micro-batch has no samples on any rank of the group, so all ranks skip the
    # collective.
    if cp_group is None or cp_group.size() == 1 or num_samples == 0:
        return sums
    return _AllReduce.apply(sums, cp_group)  # type: ignore[no-any-return, no-untyped-call]


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sums: Tensor, group: Any) -> Tensor:
        ctx.group = group
        # A copy, because autograd would treat the input as changed in place.
        out = sums.clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def row_segments(row: PlacedRow, *, scores_n: Tensor | None = None) -> Segments:
    """The segments of a row's losses."""
    return Segments(
        sample_of_R=row.losses.sample_of_R,
        set_of_n=row.set_of_n,
        fields=row.sample_fields,
        scores_n=scores_n,
        cp_group=row.cp_group,
    )


def no_segments(field_names: Sequence[str]) -> Segments:
    """The segments of a row without samples, to find the names of an objective's metrics.

    Args:
        field_names: per-sample fields, each of shape [0].
    """
    indices = torch.zeros(0, dtype=torch.int64)
    values = torch.zeros(0)
    return Segments(
        sample_of_R=indices,
        set_of_n=indices,
        fields=dict.fromkeys(field_names, values),
        scores_n=values,
    )


def chain_segments(rows: Sequence[Segments], links: Sequence[Link]) -> Segments:
    """The segments of the rows of a chain, as those of one row; losses stay in their order.

    A colocated set is in one row, or all of its samples are in pieces that begin in one row. A
    sample's score is in the row that has its end, and 0 in the others.

    >>> from megapack.rows.chain import Chain
    >>> two = Segments(sample_of_R=torch.tensor([0, 0, 1]), set_of_n=torch.tensor([0, 1]))
    >>> chain = Chain((), num_samples=3, keeps_gradients=False)
    >>> links = [Link(chain, k, torch.tensor([0, k + 1])) for k in range(2)]
    >>> joined = chain_segments([two, two], links)
    >>> joined.sample_of_R, joined.set_of_n
    (tensor([0, 0, 1, 0, 0, 2]), tensor([0, 1, 2]))
    """
    first = rows[0]
    own = [link.samples_n for link in links]
    count = links[0].chain.num_samples
    numbers = torch.arange(count, device=first.set_of_n.device)
    # A set has the number of its first sample.
    set_of_n = numbers
    for row, samples_n in zip(rows, own, strict=True):
        firsts = numbers.scatter_reduce(0, row.set_of_n, samples_n, "amin", include_self=False)
        set_of_n = set_of_n.scatter_reduce(0, samples_n, firsts[row.set_of_n], "amin")
    fields = {}
    for name, value in first.fields.items():
        fields[name] = value.new_zeros(count)
        for row, samples_n in zip(rows, own, strict=True):
            fields[name].index_copy_(0, samples_n, row.fields[name])
    scores_n = None if first.scores_n is None else first.scores_n.new_zeros(count)
    for row, samples_n in zip(rows, own, strict=True):
        if scores_n is not None and row.scores_n is not None:
            scores_n = scores_n.index_add(0, samples_n, row.scores_n)
    samples = (samples_n[row.sample_of_R] for row, samples_n in zip(rows, own, strict=True))
    return Segments(
        sample_of_R=torch.cat(list(samples)),
        set_of_n=set_of_n,
        fields=fields,
        scores_n=scores_n,
        cp_group=first.cp_group,
    )
