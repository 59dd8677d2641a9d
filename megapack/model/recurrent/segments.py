"""A packed row as a recurrent layer sees it: segments, and what each begins with.

A segment is a sequence of the row (`prefixes.sequences`), a whole sample or a dummy. It begins with
zeros, with what its parent ends with, or with what an earlier row of its chain has left. Segments
at one depth of the row's trees do not depend on each other, so a kernel scans them in one call:

    system prompt, two questions, three answers of each: three calls, of 1, 2 and 6 segments

The convolution needs no order. Before each segment the last inputs of its path are put once more,
and what the convolution gives at them is left out: any kernel that knows nothing of samples then
gives the right values, and the gather's backward adds gradients up.

Shape suffixes: T tokens of the whole row, L tokens of a level, N segments of a level, D channels, C
tokens of the longer row that the convolution sees.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megapack.prefixes import EARLIER, Branch
from megapack.rows.transfer import moved


@dataclass(frozen=True, kw_only=True)
class Level:
    """The segments of a row at one depth of its trees; a kernel scans them in one call."""

    lengths: Sequence[int]
    """Tokens of each segment, in the order of the row."""
    ends_N1: Tensor
    """int64: where each segment begins among the level's tokens; the last is the end of all."""
    host_ends_N1: Tensor = field(metadata={"moves": False})
    """The same in memory of the host."""
    numbers_1L: Tensor
    """int32 [1, L]: the number of each token's segment."""
    positions_L: Tensor | None
    """int64: the level's tokens in the row; None: they are all tokens of the row."""
    parents_N: Tensor | None
    """int64: the segment of the level before that each continues. On the first level 1 for what an
    earlier row has left, and 0 for nothing; None: all begin with nothing."""
    hands_on: bool
    """Whether something continues one of the segments."""

    def padded(self, values_L: Tensor) -> Tensor:
        """[L, ...] -> [N, tokens of the longest segment, ...], zeros after each segment's end."""
        return pad_sequence(list(values_L.split(list(self.lengths))), batch_first=True)

    def unpadded(self, values_N: Tensor) -> Tensor:
        """The inverse of `padded`."""
        parts = zip(values_N, self.lengths, strict=True)
        return torch.cat([values[:tokens] for values, tokens in parts])


@dataclass(frozen=True, kw_only=True)
class Convolution:
    """How a convolution over `kernel_size` tokens sees a row."""

    lines_C: Tensor
    """int64: tokens of the longer row, as lines of a table: kernel_size - 1 lines of what an
    earlier row has left, one of zeros, and the row."""
    kept_T: Tensor
    """int64: the row's tokens among the outputs, of which there are C - kernel_size + 1."""
    tail: Tensor | None
    """int64 [kernel_size - 1]: lines that later rows begin with; None: none does."""


@dataclass(eq=False)
class Segments:
    """The segments of a row, on a device."""

    levels: Sequence[Level]
    """From the roots on."""
    order_T: Tensor | None
    """int64: the row's tokens in the concatenated levels; None: there is one level."""
    lengths: Sequence[int]
    """Tokens of each segment of the row."""
    parents: Sequence[int]
    """The segment that each continues; -1 or `EARLIER`."""
    kept: int | None
    """The segment that later rows continue."""
    kept_place: tuple[int, int] | None
    """Its level and its index there."""
    _convolutions: dict[int, Convolution] = field(default_factory=dict)

    def convolution(self, kernel_size: int, device: torch.device) -> Convolution:
        """How a convolution sees the row; made once."""
        if kernel_size not in self._convolutions:
            self._convolutions[kernel_size] = moved(_convolution(self, kernel_size), device)
        return self._convolutions[kernel_size]


def row_segments(
    lengths: Sequence[int],
    branches: Sequence[Branch],
    kept: int | None,
    device: torch.device | str = "cpu",
) -> Segments:
    """The segments of a row.

    Args:
        lengths: padded tokens of each sequence of the row, and of its dummies, over all ranks that
            share the row.
        branches: the row's sequences; () if samples are whole and share nothing.
        kept: the sequence that later rows continue.

    A prefix of 2 tokens, continued by 3 and by 2 tokens, and a sample of 4:

    >>> def branch(start, tokens, parent):
    ...     return Branch(start=start, tokens=tokens, offset=0, parent=parent, samples=(0,), end=7)
    >>> tree = [branch(0, 2, -1), branch(2, 3, 0), branch(5, 2, 0)]
    >>> segments = row_segments([2, 3, 2, 4], tree, None)
    >>> [level.lengths for level in segments.levels]
    [(2, 4), (3, 2)]
    >>> segments.levels[1].positions_L, segments.levels[1].parents_N
    (tensor([2, 3, 4, 5, 6]), tensor([0, 0]))
    >>> segments.order_T
    tensor([ 0,  1,  6,  7,  8,  9, 10,  2,  3,  4,  5])
    """
    parents = [branch.parent for branch in branches]
    parents += [-1] * (len(lengths) - len(parents))
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    by_level = [
        [k for k, own in enumerate(depths) if own == depth] for depth in range(max(depths) + 1)
    ]
    starts = list(itertools.accumulate(lengths, initial=0))
    positions = [
        torch.cat([torch.arange(starts[k], starts[k + 1]) for k in level]) for level in by_level
    ]
    index = {k: n for level in by_level for n, k in enumerate(level)}
    last = len(by_level) - 1
    levels = []
    for depth, level in enumerate(by_level):
        own = [lengths[k] for k in level]
        before = [int(parents[k] == EARLIER) if depth == 0 else index[parents[k]] for k in level]
        ends_N1 = torch.tensor([0, *own]).cumsum(0)
        levels.append(
            Level(
                lengths=tuple(own),
                ends_N1=ends_N1,
                host_ends_N1=ends_N1,
                numbers_1L=torch.arange(len(own)).int().repeat_interleave(torch.tensor(own))[None],
                positions_L=positions[depth] if last else None,
                parents_N=torch.tensor(before) if depth or any(before) else None,
                hands_on=depth < last or kept in level,
            )
        )
    return moved(
        Segments(
            levels=tuple(levels),
            order_T=torch.cat(positions).argsort() if last else None,
            lengths=tuple(lengths),
            parents=tuple(parents),
            kept=kept,
            kept_place=None if kept is None else (depths[kept], index[kept]),
        ),
        device,
    )


def _convolution(segments: Segments, kernel_size: int) -> Convolution:
    reach = kernel_size - 1
    starts = list(itertools.accumulate(segments.lengths, initial=0))
    first = reach + 1
    # What the path through a segment ends with: its last lines.
    through: dict[int, Tensor] = {-1: torch.full((reach,), reach), EARLIER: torch.arange(reach)}
    lines = []
    kept = []
    at = 0
    for k, (tokens, parent) in enumerate(zip(segments.lengths, segments.parents, strict=True)):
        own = torch.arange(first + starts[k], first + starts[k] + tokens)
        path = torch.cat([through[parent], own])
        through[k] = path[tokens:]
        lines.append(path)
        kept.append(torch.arange(at, at + tokens))
        at += reach + tokens
    return Convolution(
        lines_C=torch.cat(lines),
        kept_T=torch.cat(kept),
        tail=None if segments.kept is None else through[segments.kept],
    )
