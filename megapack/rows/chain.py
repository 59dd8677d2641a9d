"""Chains: the rows of a rank that have the pieces of one sample.

A sample may be cut into pieces, which are in consecutive rows. These run forward in the order of
the pieces and backward in reverse. Between them, layers and the loss keep something of each piece:
keys and values, counts of experts, log-probs.

A piece is the first sample of its row and the row's first branch: so the keys of the earlier
pieces, put before those of the row, are right before the piece's own. Code that relies on it names
`PIECE`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megapack.plan.plan import MicroBatch

PIECE = 0
"""Index of a piece among the samples and among the branches of its row."""


class Piece(NamedTuple):
    """The part of a sample that is in one row, if that is not the whole sample."""

    padded_tokens: int
    """Its tokens with alignment padding, over all ranks that share the row."""
    is_last: bool
    """Whether it has the end of the sample."""


def has_piece(micro_batch: MicroBatch) -> bool:
    """Whether the row has a part of a sample only."""
    return bool(micro_batch.pieces)


def sample_spans(micro_batch: MicroBatch, lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Where the row's part of each sample begins and ends in the sample.

    Args:
        lengths: tokens of each sample of the micro-batch.
    """
    spans = [(0, length) for length in lengths]
    for _, begin, end in micro_batch.pieces:
        spans[PIECE] = begin, end
    return spans


@dataclass(eq=False)
class Chain:
    """The pieces of one sample in one pass."""

    padded_lengths: tuple[int, ...]
    """`Piece.padded_tokens` of each piece."""
    keeps_gradients: bool
    """Whether backwards follow."""
    kept: dict[Any, dict[int, Any]] = field(default_factory=dict)
    """See `Link.kept`."""

    @property
    def num_pieces(self) -> int:
        """Rows of the chain."""
        return len(self.padded_lengths)


@dataclass(frozen=True, eq=False)
class Link:
    """The place of a row in its chain."""

    chain: Chain
    index: int

    @property
    def is_last(self) -> bool:
        """Whether the row has the chain's last piece."""
        return self.index + 1 == self.chain.num_pieces

    @property
    def padded_tokens(self) -> int:
        """`Piece.padded_tokens` of the row's piece."""
        return self.chain.padded_lengths[self.index]

    @property
    def earlier(self) -> tuple[int, ...]:
        """Padded tokens of each earlier piece."""
        return self.chain.padded_lengths[: self.index]

    def kept(self, owner: Any) -> dict[int, Any]:
        """What an owner, a layer or the loss, keeps of the chain: piece -> anything.

        In the order of the pieces, as that is the order of their forwards; a second forward of a
        piece, to recompute it, finds what the first one has kept.
        """
        return self.chain.kept.setdefault(owner, {})


def link_pieces(pieces: Sequence[Piece | None], *, keeps_gradients: bool) -> list[Link | None]:
    """The place of each row in its chain; None for a row of whole samples.

    Args:
        pieces: of the rows of a rank, in the order of the plan.

    >>> pieces = [None, Piece(8, is_last=False), Piece(6, is_last=True)]
    >>> [link and (link.index, link.earlier) for link in link_pieces(pieces, keeps_gradients=True)]
    [None, (0, ()), (1, (8,))]
    """
    links: list[Link | None] = [None] * len(pieces)
    begun: dict[int, int] = {}
    for row, piece in enumerate(pieces):
        if piece is None:
            continue
        begun[row] = piece.padded_tokens
        if piece.is_last:
            chain = Chain(tuple(begun.values()), keeps_gradients)
            for index, own in enumerate(begun):
                links[own] = Link(chain, index)
            begun = {}
    return links
