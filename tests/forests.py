"""Rows of samples that share prefixes, and their attention written out with a mask."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megapack.layout import Layout
from megapack.model.attention.packed import packed_seq_params
from megapack.model.attention.row import RowView, row_view, with_view
from megapack.prefixes import Branch, PrefixTable, SharedPrefixes, row_branches
from tests.groups import RankOf

# Tokens of the dummy samples at the end of a row: a prime number of alignment units, and two equal
# ones.
DUMMY_UNITS = (3, 2, 2)


@dataclass(frozen=True)
class Forest:
    """The places of a row's samples."""

    branches: tuple[Branch, ...]
    spans: tuple[int, ...]
    """Tokens of each branch, then of each dummy."""

    @property
    def tokens(self) -> int:
        return sum(self.spans)

    @property
    def positions_T(self) -> Tensor:
        """The position of each token in its sample."""
        offsets = [branch.offset for branch in self.branches]
        offsets += [0] * (len(self.spans) - len(offsets))
        return torch.cat(
            [torch.arange(first, first + n) for first, n in zip(offsets, self.spans, strict=True)]
        )

    @property
    def mask_TT(self) -> Tensor:
        """Whether a query (line) attends to a key: those of its branch up to its own, and all of
        the branches that this one continues."""
        seen_TT = torch.zeros(self.tokens, self.tokens, dtype=torch.bool)
        start = 0
        for index, n in enumerate(self.spans):
            own = slice(start, start + n)
            seen_TT[own, own] = torch.ones(n, n).tril().bool()
            parent = self.branches[index].parent if index < len(self.branches) else -1
            while parent >= 0:
                above = self.branches[parent]
                seen_TT[own, above.start : above.start + above.tokens] = True
                parent = above.parent
            start += n
        return seen_TT

    def windowed_TT(self, window: int | None) -> Tensor:
        """`mask_TT` of a layer whose tokens see this number of tokens, their own among them."""
        seen_TT = self.mask_TT
        if window is None:
            return seen_TT
        return seen_TT & (self.positions_T[:, None] - self.positions_T < window)

    def params(self, cp: int = 1) -> Any:
        """Megatron's description of the row."""
        longest = int(self.positions_T.max()) + 1
        ends = torch.tensor([0, *self.spans]).cumsum(0).int()
        params = packed_seq_params(ends, longest, self.tokens, cp=cp)
        view = RowView(ends, params.max_seqlen_q, lengths=self.spans, branches=self.branches)
        return with_view(params, view)

    def view(self, rank: int = 0, cp: int = 1) -> RowView:
        """The row as attention of one context-parallel rank sees it."""
        return row_view(self.params(cp), RankOf(rank, cp))


def forest(samples: list[list[int]], cp: int = 1) -> Forest:
    """The row of these samples, with dummies after them."""
    layout = Layout(dp=1, cp=cp)
    lengths = [len(sample) for sample in samples]
    prefixes = SharedPrefixes.from_samples(samples)
    table = PrefixTable(prefixes, lengths, layout)
    branches = tuple(row_branches(range(len(samples)), lengths, layout, table))
    spans = [branch.tokens for branch in branches]
    spans += [units * layout.sample_alignment for units in DUMMY_UNITS]
    return Forest(branches, tuple(spans))


def random_forest(seed: int, cp: int = 1, depth: int = 2, children: int = 3) -> Forest:
    """Trees in which every path from a root has at most `depth` prefixes, and single samples."""
    rng = random.Random(seed)
    samples: list[list[int]] = [[90_000 + k] * rng.randint(1, 9 * cp) for k in range(2)]

    def grow(path: list[int], left: int) -> None:
        own = [rng.randrange(1000) for _ in range(rng.randint(1, 7 * cp))]
        if left == 0:
            samples.append(path + own)
            return
        for k in range(rng.randint(2, children)):
            grow([*path, *own, 10_000 + k], left - 1 if rng.random() < 0.8 else 0)

    for _ in range(2):
        grow([rng.randrange(1000, 10_000)], depth)
    rng.shuffle(samples)
    return forest(samples, cp)


def row_tensors(
    tokens: int, heads: int, groups: int, width: int, value_width: int | None = None, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a row in float64."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    return (
        draw(tokens, heads, width),
        draw(tokens, groups, width),
        draw(tokens, groups, value_width or width),
    )


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask_TT: Tensor,
    scale: float,
    sink_H: Tensor | None = None,
) -> Tensor:
    """Attention written out, [T, heads, d]; a sink is one more logit, whose value is 0."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    scores = scores.masked_fill(~mask_TT, -math.inf)
    if sink_H is not None:
        scores = torch.cat([sink_H[:, None, None].expand(-1, len(q), 1), scores], dim=-1)
    p = scores.softmax(-1)[..., -len(k) :]
    return torch.einsum("hqk,khd->qhd", p, v)


def with_gradients(out: Tensor, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """The result, and the gradients of a sum of it with weights."""
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out).sin()
    weights = weights.to(out.dtype)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), inputs)]


def error(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest difference, relative to the largest number of each tensor."""
    assert [x.shape for x in found] == [x.shape for x in wanted]
    return max(
        float((a.double() - b.double()).abs().max() / b.double().abs().max())
        for a, b in zip(found, wanted, strict=True)
    )
