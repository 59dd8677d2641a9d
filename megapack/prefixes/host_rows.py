"""`HostRow`: a row that another framework has packed, and the shorter row that layers run on.

The framework's row holds each answer with a copy of its prompt. The shorter row, the shared row,
holds each common beginning once. Two arrays lead from one to the other:

    tokens of the host's row  -> [to_host]   -> tokens of the shared row -> layers
    hidden states of the shared row -> [to_shared] -> hidden states of the host's row -> its head

Tokens with equal tokens before them have equal hidden states. So what the framework computes from
the hidden states of its row is what it would have computed without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megapack.base.arrays import Ints
from megapack.layout import Layout, round_up
from megapack.prefixes.branches import Branch, row_branches, sequences
from megapack.prefixes.shared import SharedPrefixes
from megapack.prefixes.table import PrefixTable
from megapack.prefixes.worth import worthwhile


@dataclass(frozen=True)
class HostRow:
    """A host's row whose samples share prefixes, and its shared row; both over all CP ranks."""

    host_spans: tuple[int, ...]
    """Padded tokens of each sample of the host's row; padding behind them counts as a sample."""
    branches: tuple[Branch, ...]
    """The sequences of the shared row."""
    spans: tuple[int, ...]
    """Tokens of each of these, and of the padding behind them if there is any."""

    @property
    def host_tokens(self) -> int:
        """Tokens of the host's row."""
        return sum(self.host_spans)

    @property
    def tokens(self) -> int:
        """Tokens of the shared row."""
        return sum(self.spans)

    @cached_property
    def to_shared(self) -> Ints:
        """int64 [host_tokens]: the position in the shared row of each position."""
        return self._maps[0]

    @cached_property
    def to_host(self) -> Ints:
        """int64 [tokens]: one of the positions in the host's row of each position; 0 for padding
        behind the branches."""
        return self._maps[1]

    @cached_property
    def _maps(self) -> tuple[Ints, Ints]:
        to_shared: Ints = np.zeros(self.host_tokens, dtype=np.int64)
        to_host: Ints = np.zeros(self.tokens, dtype=np.int64)
        starts = np.cumsum([0, *self.host_spans])
        for branch in self.branches:
            for sample in branch.samples:
                end = branch.start + min(branch.tokens, self.host_spans[sample] - branch.offset)
                own = np.arange(branch.start, end)
                copy = own - branch.start + starts[sample] + branch.offset
                to_shared[copy] = own
                to_host[own] = copy
        return to_shared, to_host


def find_host_row(ids: Ints, spans: Sequence[int], layout: Layout) -> HostRow | None:
    """The row of a host with its shared row; None if its samples share nothing that pays.

    Args:
        ids: token ids of the whole row, padding included.
        spans: padded tokens of each sample, multiples of the layout's sample alignment.

    Raises:
        DataError: ids that no vocabulary has, see `SharedPrefixes.from_samples`.

    >>> row = find_host_row(np.array([5, 6, 7, 8, 5, 6, 7, 9]), [4, 4], Layout())
    >>> row.spans, row.to_host.tolist(), row.to_shared.tolist()
    ((2, 2, 2), [4, 5, 2, 3, 6, 7], [0, 1, 2, 3, 0, 1, 4, 5])
    """
    samples = np.split(np.asarray(ids), np.cumsum(spans)[:-1])
    prefixes = SharedPrefixes.from_samples(samples)
    prefixes = worthwhile(prefixes, np.asarray(spans, dtype=np.int64), layout)
    if not prefixes.order:
        return None
    table = PrefixTable(prefixes, spans, layout)
    branches = tuple(sequences(row_branches(range(len(samples)), spans, layout, table)))
    held = [branch.tokens for branch in branches]
    padding = round_up(sum(held), layout.row_alignment) - sum(held)
    if sum(held) + padding >= sum(spans):
        return None
    return HostRow(tuple(spans), branches, (*held, padding) if padding else tuple(held))
