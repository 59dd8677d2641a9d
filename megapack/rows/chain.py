"""Chains: consecutive rows of a rank that have the pieces of the same samples.

A sample may be cut into pieces, which are in consecutive rows. A family, samples that begin with
the same tokens, may be cut where these end: its first pieces, which share all their positions, are
in one row, and its second pieces in the rows after it. Rows run forward in this order and backward
in reverse. Between them, layers and the loss keep something of each row: keys and values, counts of
experts, log-probs.

What a row keeps is one branch, so later rows of the chain carry the same keys for all their pieces:
those that the rows before have kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megapack.plan.plan import MicroBatch
from megapack.prefixes import Branch
from megapack.rows.transfer import moved


class Piece(NamedTuple):
    """What a row of a chain has of samples that are in pieces."""

    continues: bool
    """Whether the samples begin in earlier rows."""
    start: int
    """Position of the first token that later rows attend to."""
    kept_tokens: int
    """Such tokens with alignment padding, over all ranks that share the row; 0 if the samples end
    in the row."""


def has_piece(micro_batch: MicroBatch) -> bool:
    """Whether the row has a part of a sample only."""
    return bool(micro_batch.pieces)


def sample_spans(micro_batch: MicroBatch, lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Where the row's part of each sample begins and ends in the sample.

    Args:
        lengths: tokens of each sample of the micro-batch.

    >>> from megapack.plan import Part
    >>> row = MicroBatch((4, 2), 5, 5, 0, 5, pieces=(Part(4, begin=8, end=10),))
    >>> sample_spans(row, [10, 3])
    [(8, 10), (0, 3)]
    """
    pieces = {sample: (begin, end) for sample, begin, end in micro_batch.pieces}
    whole = ((0, length) for length in lengths)
    return [pieces.get(i, span) for i, span in zip(micro_batch.samples, whole, strict=True)]


def row_piece(
    micro_batch: MicroBatch, lengths: Sequence[int], branches: Sequence[Branch]
) -> Piece | None:
    """The pieces of a row; None if all its samples are whole.

    Args:
        lengths: tokens of each sample of the micro-batch.
        branches: those of the row.
    """
    for sample, begin, end in micro_batch.pieces:
        index = micro_batch.samples.index(sample)
        branch = next(own for own in branches if index in own.samples)
        return Piece(begin > 0, branch.start, branch.tokens if end < lengths[index] else 0)
    return None


@dataclass(eq=False)
class Chain:
    """The pieces of one sample, or of one family, in one pass."""

    pieces: tuple[Piece, ...]
    """Of each row."""
    num_samples: int
    """Samples in any of the rows."""
    keeps_gradients: bool
    """Whether backwards follow."""
    kept: dict[Any, dict[int, Any]] = field(default_factory=dict)
    """See `Link.kept`."""

    @property
    def num_rows(self) -> int:
        """Rows of the chain."""
        return len(self.pieces)


@dataclass(frozen=True, eq=False)
class Link:
    """The place of a row in its chain."""

    chain: Chain
    index: int
    samples_n: Tensor
    """int64: index of each sample of the row among the samples of the chain."""

    @property
    def is_last(self) -> bool:
        """Whether the row is the chain's last one."""
        return self.index + 1 == self.chain.num_rows

    @property
    def piece(self) -> Piece:
        """That of the row."""
        return self.chain.pieces[self.index]

    @property
    def earlier(self) -> tuple[int, ...]:
        """Tokens that each earlier row keeps."""
        kept = (piece.kept_tokens for piece in self.chain.pieces[: self.index])
        return tuple(tokens for tokens in kept if tokens)

    def kept(self, owner: Any) -> dict[int, Any]:
        """What an owner, a layer or the loss, keeps of the chain: index of a row -> anything.

        In the order of the rows, as that is the order of their forwards; a second forward of a row,
        to recompute it, finds what the first one has kept.
        """
        return self.chain.kept.setdefault(owner, {})


def link_rows(
    rows: Sequence[Any], *, keeps_gradients: bool, device: torch.device | str = "cpu"
) -> list[Link | None]:
    """The place of each row in its chain; None for a row of whole samples.

    Args:
        rows: the packed rows of a rank, in the order of the plan.
        device: that of `Link.samples_n`.
    """
    chains: list[list[int]] = []
    for k, row in enumerate(rows):
        if row.piece is not None:
            if not row.piece.continues:
                chains.append([])
            chains[-1].append(k)
    links: list[Link | None] = [None] * len(rows)
    for chain in chains:
        numbers: dict[int, int] = {}
        own = [[numbers.setdefault(i, len(numbers)) for i in rows[k].samples] for k in chain]
        pieces = tuple(piece for piece in (rows[k].piece for k in chain) if piece is not None)
        made = Chain(pieces, len(numbers), keeps_gradients)
        for index, samples_n in enumerate(moved(tuple(map(torch.tensor, own)), device)):
            links[chain[index]] = Link(made, index, samples_n)
    return links
