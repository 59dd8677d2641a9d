"""Branches: the parts of a row, each of which belongs to the same samples from its first token to
its last.

Without shared prefixes, each sample is one branch. With them, a tree of samples becomes branches in
depth-first order: a prefix is followed by all branches that begin with it. So the tokens that
attend to a branch, besides its own, are one run right after it.

Where a sample ends and another goes on, nothing parts: the sample has no tokens of its own, and
layers run the branches before and after its end as one sequence. So the turns of an agent, each of
which begins with all that was said before, are one sequence with a branch for each turn.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megapack.layout import Layout
from megapack.prefixes.table import PrefixTable, Spans

EARLIER = -2
"""Parent of a branch that continues rows before: it attends to all keys that the row carries."""

DUMMY_TOKENS = 512
"""Length of the dummy samples in a row's tail, before alignment.

Attention costs length^2 per sample: a tail of 6144 tokens costs 12 * 512^2 = 3 M as 12 dummies,
6144^2 = 38 M as one. Kernels start blocks for each sample up to the longest, so many short dummies
(96 of 64 tokens) cost more than a few longer ones. Chosen by hand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A run of a row's positions that belong to the same samples."""

    start: int
    """Its first position in the row."""
    tokens: int
    """Its positions, alignment padding included, which only the end of a sequence has."""
    offset: int
    """Positions of its samples before it."""
    parent: int
    """Index of the branch that it continues; -1 for the first branch of its samples, `EARLIER` if
    that is not the samples' beginning."""
    samples: tuple[int, ...]
    """Indices, among the row's samples, of those that it belongs to."""
    end: int
    """The position after the last branch that continues it, or after itself. The positions from
    start + tokens to end attend to all of its tokens."""


def row_branches(
    samples: Sequence[int],
    lengths: Sequence[int],
    layout: Layout,
    table: PrefixTable | None,
    pieces: Sequence[tuple[int, int, int]] = (),
) -> list[Branch]:
    """The branches of a row, in the order of their positions.

    Args:
        samples: indices of the row's samples.
        lengths: real tokens of each.
        table: the prefixes that samples share; None: they share nothing.
        pieces: the samples of which the row has a piece, and where this begins and ends; all begin
            at one position. They share with each other only, and so do the whole samples.

    Samples of 4, 2 and 5 tokens, of which the first and the last have 3 tokens in common and share
    2 positions:

    >>> from megapack.prefixes.shared import SharedPrefixes
    >>> layout = Layout()
    >>> table = PrefixTable(SharedPrefixes((0, 2), (0, 3)), [4, 2, 5], layout)
    >>> for branch in row_branches([0, 1, 2], [4, 2, 5], layout, table):
    ...     print(branch.start, branch.tokens, branch.offset, branch.parent, branch.samples)
    0 2 0 -1 (0, 2)
    2 2 2 0 (0,)
    4 3 2 0 (2,)
    7 2 0 -1 (1,)

    A sample of 3 tokens that another begins with:

    >>> table = PrefixTable(SharedPrefixes((0, 1), (0, 3)), [3, 5], layout)
    >>> for branch in row_branches([0, 1], [3, 5], layout, table):
    ...     print(branch.start, branch.tokens, branch.offset, branch.parent, branch.samples)
    0 3 0 -1 (0, 1)
    3 2 3 0 (1,)
    """
    if table is None and not pieces:
        tokens = layout.aligned_sample_tokens(np.asarray(lengths, dtype=np.int64)).tolist()
        stops = itertools.accumulate(tokens)
        return [
            Branch(start=stop - own, tokens=own, offset=0, parent=-1, samples=(k,), end=stop)
            for k, (own, stop) in enumerate(zip(tokens, stops, strict=True))
        ]
    spans = Spans.of(samples, pieces)
    ends = np.where(spans.is_piece, spans.end, np.asarray(lengths, dtype=np.int64))
    aligned = (layout.aligned_sample_tokens(ends) - spans.begin).tolist()
    real = (ends - spans.begin).tolist()
    branches: list[Branch] = []
    start = 0
    for members, shared in _trees(samples, table, spans):
        before = int(spans.begin[members[0]])
        root = EARLIER if before else -1
        own = [aligned[k] for k in members]
        for k, following in enumerate(shared[1:]):
            if following == own[k]:  # The next sample has all of it.
                shared[k + 1], own[k] = real[members[k]], 0
        for branch in _tree_branches(members, shared, own):
            parent = root if branch.parent < 0 else branch.parent + start
            branches.append(replace(branch, parent=parent, offset=branch.offset + before))
        start = len(branches)
    return _placed(branches)


def _trees(
    samples: Sequence[int], table: PrefixTable | None, spans: Spans
) -> Iterator[tuple[list[int], list[int]]]:
    """Indices of the samples of each tree in depth-first order, and what each shares with the one
    before it; trees in the order of their first sample."""
    if table is None or len(samples) < 2:
        yield from (([k], [0]) for k in range(len(samples)))
        return
    one_row = np.zeros(len(samples), dtype=np.int64)
    chosen, shared = table.neighbours(np.asarray(samples, dtype=np.int64), one_row, spans)
    firsts = np.flatnonzero(shared == 0)[1:]
    trees = [
        (members.tolist(), own.tolist())
        for members, own in zip(np.split(chosen, firsts), np.split(shared, firsts), strict=True)
        if members.size
    ]
    in_tree = set(chosen.tolist())
    trees += [([k], [0]) for k in range(len(samples)) if k not in in_tree]
    yield from sorted(trees, key=lambda tree: min(tree[0]))


def _tree_branches(
    members: Sequence[int], shared: Sequence[int], ends: Sequence[int]
) -> list[Branch]:
    """The branches of one tree in depth-first order, without their places in the row.

    Args:
        shared: positions that each shares with the one before it.
        ends: padded tokens of each; 0 if the next one has all of it.
    """
    branches: list[Branch] = []
    # Runs of samples that have the first `depth` positions in common, the next run last.
    runs = [(0, len(members), 0, -1)]
    while runs:
        first, last, depth, parent = runs.pop()
        inside = shared[first + 1 : last]
        end = min(inside) if inside else ends[first]
        own = tuple(sorted(members[first:last]))
        # Pieces may end where they part.
        if end > depth:
            branches.append(
                Branch(start=0, tokens=end - depth, offset=depth, parent=parent, samples=own, end=0)
            )
            parent = len(branches) - 1
        if inside:
            cuts = [first, *(k for k in range(first + 1, last) if shared[k] == end), last]
            parts = [(a, b, end, parent) for a, b in itertools.pairwise(cuts)]
            runs += reversed(parts)
    return branches


def _placed(branches: Sequence[Branch]) -> list[Branch]:
    starts = [*itertools.accumulate((branch.tokens for branch in branches), initial=0)]
    ends = starts[1:]
    for k in range(len(branches) - 1, -1, -1):
        parent = branches[k].parent
        if parent >= 0:
            ends[parent] = max(ends[parent], ends[k])
    return [
        replace(branch, start=start, end=end)
        for branch, start, end in zip(branches, starts, ends, strict=False)
    ]


def sequences(branches: Sequence[Branch]) -> list[Branch]:
    """A row's branches as layers run them: those that continue each other without parting are one,
    which belongs to the samples of the first one.

    >>> def branch(start, tokens, parent):
    ...     return Branch(start=start, tokens=tokens, offset=0, parent=parent, samples=(0,), end=9)
    >>> row = [branch(0, 2, -1), branch(2, 3, 0), branch(5, 2, 1), branch(7, 2, 1)]
    >>> [(joined.tokens, joined.parent) for joined in sequences(row)]
    [(5, -1), (2, 0), (2, 0)]
    """
    num_following = Counter(branch.parent for branch in branches)
    joined: list[Branch] = []
    number: list[int] = []
    for branch in branches:
        parent = branch.parent
        if parent >= 0 and num_following[parent] == 1:
            joined[-1] = replace(joined[-1], tokens=joined[-1].tokens + branch.tokens)
        else:
            joined.append(replace(branch, parent=number[parent] if parent >= 0 else parent))
        number.append(len(joined) - 1)
    return joined


def dummy_spans(tail: int, alignment: int) -> list[int]:
    """Divide a row's tail into short dummy samples of aligned length.

    >>> dummy_spans(1100, 1)
    [512, 512, 76]
    """
    unit = max(alignment, DUMMY_TOKENS // alignment * alignment)
    return [unit] * (tail // unit) + ([tail % unit] if tail % unit else [])
