"""The micro-batch: the samples of one forward and backward, as one row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megapack.layout import block_ranks

# What the cell of a plain row ends without: tokens that samples share, and its width.
_PLAIN = (0, 1)


class Part(NamedTuple):
    """Some of a sample's real tokens: [begin, end)."""

    sample: int
    """Index of the sample in the input."""
    begin: int
    end: int

    @property
    def tokens(self) -> int:
        """Real tokens of the part."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples of one forward and backward, packed into one row.

    One DP rank runs it, or several consecutive ones that share the row under
    context_parallel="dynamic": each holds a part of every sample, as context-parallel ranks do.
    """

    samples: tuple[int, ...]
    """Sample indices in row order; () is a padding micro-batch."""
    row_tokens: int
    """Length of the whole row, before it is cut over CP ranks and `dp_ranks`."""
    tokens: int
    """Real tokens of its samples, of a piece those in the row."""
    tokens_sq: int
    """Squared tokens that attention computes: the sum of squared aligned lengths, less that of the
    squared positions that samples share with another one, or that are before a piece. The cost of
    attention grows with it."""
    padded_tokens: int
    """Tokens that the row holds, with the alignment of samples and row. 0 for a padding
    micro-batch."""
    shared_tokens: int = 0
    """Tokens that the row does not hold again, because another of its samples begins with them."""
    dp_ranks: tuple[int, ...] = ()
    """The DP ranks that share the row; () if one rank has it."""
    pieces: tuple[Part, ...] = ()
    """Which tokens the row has of samples that are cut. These are the first of `samples`, and their
    other pieces are in the neighbouring micro-batches."""

    def cell(self) -> tuple[Any, ...]:
        """The row in a plan's JSON; `from_cell` is the inverse. What only features need stands at
        the end, and a row without it has a shorter cell, so that plans without a feature keep their
        digests.

        >>> MicroBatch((3, 5), 8, 7, 25, 8).cell()
        ((3, 5), 8, 7, 25, 8)
        >>> MicroBatch((3,), 8, 4, 16, 8, pieces=(Part(3, 0, 4),)).cell()
        ((3,), 8, 4, 16, 8, 0, 1, 0, 4)
        """
        ends = [end for part in self.pieces for end in (part.begin, part.end)]
        more = [self.shared_tokens, self.width, *ends]
        while 0 < len(more) <= len(_PLAIN) and more[-1] == _PLAIN[len(more) - 1]:
            more.pop()
        sizes = (self.row_tokens, self.tokens, self.tokens_sq, self.padded_tokens)
        return (self.samples, *sizes, *more)

    @classmethod
    def from_cell(cls, rank: int, cell: Sequence[Any]) -> MicroBatch:
        """The row of a cell whose types were checked. The ranks of a shared row are an aligned
        block, so one of them and the width say which they are."""
        samples, more = cell[0], cell[5:]
        shared, width = (more[k] if k < len(more) else plain for k, plain in enumerate(_PLAIN))
        ends = more[len(_PLAIN) :]
        pieces = [Part(*part) for part in zip(samples, ends[::2], ends[1::2], strict=False)]
        others = (*cell[1:5], shared, block_ranks(rank, width), tuple(pieces))
        return cls(tuple(samples), *others)

    def ranks(self, own: int) -> tuple[int, ...]:
        """The DP ranks that run it, of which `own` is one."""
        return self.dp_ranks or (own,)

    @property
    def begun_samples(self) -> tuple[int, ...]:
        """Samples whose first token is in the row: all but those that earlier pieces begin."""
        if not self.pieces:
            return self.samples
        later = {part.sample for part in self.pieces if part.begin > 0}
        return tuple(i for i in self.samples if i not in later)

    @property
    def held_tokens(self) -> int:
        """Real tokens that the row holds: those of its samples, shared ones once."""
        return self.tokens - self.shared_tokens

    @property
    def width(self) -> int:
        """Number of DP ranks that the row lies over."""
        return max(1, len(self.dp_ranks))
