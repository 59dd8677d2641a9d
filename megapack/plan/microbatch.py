"""The micro-batch: the samples of one forward and backward, as one row."""

from __future__ import annotations

from dataclasses import dataclass


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
    """Tokens that the row holds, plus the alignment of the samples and of the row; 0 for a padding
    micro-batch."""
    shared_tokens: int = 0
    """Tokens that the row does not hold again, because another of its samples begins with them."""
    dp_ranks: tuple[int, ...] = ()
    """The DP ranks that share the row; () if one rank has it."""
    piece: tuple[int, int] | None = None
    """Where the row's part of its first sample begins and ends, in real tokens, if it has not the
    whole sample: a piece. The sample's other pieces are in the neighbouring micro-batches."""

    @property
    def begun_samples(self) -> tuple[int, ...]:
        """Samples whose first token is in the row: all but one that earlier pieces begin."""
        return self.samples[1:] if self.piece is not None and self.piece[0] > 0 else self.samples

    @property
    def held_tokens(self) -> int:
        """Real tokens that the row holds: those of its samples, shared ones once."""
        return self.tokens - self.shared_tokens

    @property
    def width(self) -> int:
        """Number of DP ranks that the row lies over."""
        return max(1, len(self.dp_ranks))
