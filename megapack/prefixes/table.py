"""`PrefixTable`: the tokens that rows save by holding common beginnings once.

A row that holds samples in depth-first order needs, for each sample, only the positions that it
does not share with the sample before it. So a row saves the sum of these shared positions, and in
squared tokens (the cost of attention) the sum of their squares: the positions s to L - 1 of a
sample attend to L^2 - s^2 pairs, counted twice. Sums over pairs of neighbours are all that
planning needs to know of a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megapack.base.arrays import Bools, Ints
from megapack.layout import Layout
from megapack.prefixes.shared import SharedPrefixes


class Spans(NamedTuple):
    """What rows hold of samples: whole ones, or pieces. Pieces of a row share with each other, and
    whole samples with each other."""

    begin: Ints
    """int64: positions of each sample before its piece; 0 for a whole one."""
    end: Ints
    """int64: positions up to the end of its piece; 0 for a whole one."""
    is_piece: Bools

    @classmethod
    def of(cls, samples: Sequence[int], pieces: Sequence[tuple[int, int, int]]) -> Spans:
        """Those of a row.

        Args:
            samples: of the row.
            pieces: the samples of which it has a piece, and where this begins and ends.
        """
        begin, end = np.zeros((2, len(samples)), dtype=np.int64)
        is_piece = np.zeros(len(samples), dtype=np.bool_)
        for sample, *span in pieces:
            k = samples.index(sample)
            begin[k], end[k] = span
            is_piece[k] = True
        return cls(begin, end, is_piece)


class PrefixTable:
    """The prefixes of a batch on one layout.

    Shared positions are a multiple of the sample alignment, so that a sample's other positions are
    cut over context-parallel ranks as a sample of their own.

    Args:
        lengths: int64 [n], real tokens of each sample of the batch.

    Attributes:
        order: int64 [p], see `SharedPrefixes.order`.
        place: int64 [n], each sample's index in `order`; -1 for samples that share nothing.
        shared: int64 [p], positions that each sample of `order` shares with the one before it.
    """

    def __init__(
        self, prefixes: SharedPrefixes, lengths: Sequence[int] | Ints, layout: Layout
    ) -> None:
        self.prefixes = prefixes
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.layout = layout
        self.order = np.array(prefixes.order, dtype=np.int64)
        self.shared = shared_positions(prefixes, self.lengths, layout)
        self.place: Ints = np.full(self.lengths.size, -1, dtype=np.int64)
        self.place[self.order] = np.arange(self.order.size)
        # _minima[k][i] is the smallest of 2**k numbers from i on; made when a pair needs it. For a
        # million samples a k takes 8 MB, and groups of 8 need three of the twenty.
        self._minima = [self.shared]
        self._wide: dict[int, PrefixTable] = {}

    def over(self, width: int) -> PrefixTable:
        """The table for rows over `width` DP ranks, whose samples have a coarser alignment."""
        if width == 1:
            return self
        if width not in self._wide:
            layout = self.layout.over(width)
            self._wide[width] = PrefixTable(self.prefixes, self.lengths, layout)
        return self._wide[width]

    def between(self, first: Ints, second: Ints) -> Ints:
        """Positions that two samples share, for arrays of pairs.

        Args:
            first, second: int64, places of the two samples, first < second.
        """
        level = np.frexp(second - first)[1] - 1
        out = np.empty(first.size, dtype=np.int64)
        for k in np.flatnonzero(np.bincount(level)).tolist():
            pairs = np.flatnonzero(level == k)
            minima = self._smallest(k)
            out[pairs] = np.minimum(minima[first[pairs] + 1], minima[second[pairs] + 1 - (1 << k)])
        return out

    def _smallest(self, level: int) -> Ints:
        while len(self._minima) <= level:
            last = self._minima[-1]
            width = 1 << (len(self._minima) - 1)
            self._minima.append(np.minimum(last[:-width], last[width:]))
        return self._minima[level]

    def neighbours(
        self, samples: Ints, group_of: Ints, spans: Spans | None = None
    ) -> tuple[Ints, Ints]:
        """Samples in depth-first order within their groups, and what each shares there.

        Args:
            samples: int64 [k], samples of the batch, each once in a group.
            group_of: int64 [k], the row, or another set, that each is in.
            spans: [k], what groups hold of them; None: all are whole.

        Returns:
            chosen: int64 [j], indices into `samples` of those that may share, sorted by group and
                then by place.
            shared: int64 [j], positions that each shares with the one before it in its group.
        """
        if spans is not None:
            group_of = 2 * group_of + spans.is_piece
        chosen = np.flatnonzero(self.place[samples] >= 0)
        place = self.place[samples[chosen]]
        by_place = np.lexsort((place, group_of[chosen]))
        chosen = chosen[by_place]
        place = place[by_place]
        group = group_of[chosen]
        shared = np.zeros(chosen.size, dtype=np.int64)
        follows = np.flatnonzero(group[1:] == group[:-1]) + 1
        shared[follows] = self.between(place[follows - 1], place[follows])
        if spans is not None:
            ends = np.where(spans.is_piece, spans.end, shared.max(initial=0))[chosen]
            shared = np.maximum(np.minimum(shared, ends) - spans.begin[chosen], 0)
        return chosen, shared

    def saved(
        self, samples: Ints, row_of: Ints, num_rows: int, spans: Spans | None = None
    ) -> tuple[Ints, Ints]:
        """Tokens and squared tokens that each row saves: int64 [num_rows] each.

        >>> import numpy as np
        >>> prefixes = SharedPrefixes.from_samples([[5, 6, 7, 8], [5, 6, 7, 9], [5, 6, 7]])
        >>> table = PrefixTable(prefixes, [4, 4, 3], Layout())
        >>> table.saved(np.arange(3), np.array([0, 0, 1]), 2)
        (array([2, 0]), array([4, 0]))
        >>> table.saved(np.arange(3), np.array([0, 0, 0]), 1)
        (array([5]), array([13]))
        """
        chosen, shared = self.neighbours(samples, row_of, spans)
        tokens, tokens_sq = np.zeros((2, num_rows), dtype=np.int64)
        np.add.at(tokens, row_of[chosen], shared)
        # A position of a piece attends to those before the piece too.
        before = 0 if spans is None else 2 * spans.begin[chosen]
        np.add.at(tokens_sq, row_of[chosen], shared * (shared + before))
        return tokens, tokens_sq

    def saved_in_row(self, samples: Ints, spans: Spans | None = None) -> tuple[int, int]:
        """Tokens and squared tokens that one row of these samples saves."""
        tokens, tokens_sq = self.saved(samples, np.zeros_like(samples), 1, spans)
        return int(tokens[0]), int(tokens_sq[0])


def shared_positions(prefixes: SharedPrefixes, lengths: Ints, layout: Layout) -> Ints:
    """Positions that each sample of `prefixes.order` shares with the one before it: int64 [p].

    A sample that the one after it begins with, such as an agent's turn, shares all of its
    positions, padding included: its last one predicts nothing that could differ. Not with
    multi-token prediction, whose layers would read tokens after its end, and have losses of experts
    there.
    """
    unit = layout.sample_alignment
    common = np.array(prefixes.common, dtype=np.int64)
    before = np.roll(lengths[np.array(prefixes.order, dtype=np.int64)], 1)
    parted = np.maximum(common - prefixes.own_tokens, 0) // unit * unit
    is_whole = (common == before) & (common > 1) & (prefixes.own_tokens == 1)
    return np.where(is_whole, layout.aligned_sample_tokens(common), parted)
