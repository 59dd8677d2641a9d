"""Scans of a row: one call of a kernel per level, from the roots on.

Shape suffixes: T tokens of the row, L tokens of a level, N segments of a level, C tokens of a
chunk.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megapack.model.recurrent.segments import Level, Segments

CHUNK_TOKENS = 64
"""Tokens that torch's scans treat at a time, as flash-linear-attention does."""


ScanKernel = Callable[[Sequence[Tensor], Level, Tensor | None], tuple[Tensor, Tensor | None]]
"""Scans segments that do not depend on each other.

Of inputs [L, ...] each, a level and the states [N, ...] that its segments begin with (None = zeros)
it makes [L, heads, channels] and the states at the segments' ends, which may be None if the level
hands nothing on.
"""


def scan_row(
    kernel: ScanKernel, inputs: Sequence[Tensor], segments: Segments, earlier: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Scan a row of segments; a state that several segments begin with gets all their gradients.

    Args:
        inputs: [T, ...] each, of the whole row.
        earlier: [1, ...], the state that an earlier row of the chain has left; None: none has.

    Returns:
        [T, heads, channels]; and [1, ...], the state that the row leaves, or None.
    """
    outs = []
    kept = None
    before = None if earlier is None else torch.cat([torch.zeros_like(earlier), earlier])
    for depth, level in enumerate(segments.levels):
        at = level.positions_L
        own = inputs if at is None else [values.index_select(0, at) for values in inputs]
        initial = None
        if level.parents_N is not None:
            assert before is not None, "a segment continues what nothing has left"
            initial = before.index_select(0, level.parents_N)
        out, before = kernel(own, level, initial)
        outs.append(out)
        if segments.kept_place is not None and segments.kept_place[0] == depth:
            assert before is not None
            index = segments.kept_place[1]
            kept = before[index : index + 1]
    if segments.order_T is None:
        return outs[0], kept
    return torch.cat(outs).index_select(0, segments.order_T), kept


def scan_in_chunks(
    chunk: Callable[[Sequence[Tensor], Tensor], tuple[Tensor, Tensor]],
    inputs: Sequence[Tensor],
    level: Level,
    initial: Tensor,
) -> tuple[Tensor, Tensor]:
    """Scan all segments of a level side by side, a chunk of each at a time.

    A segment takes part as long as it has tokens: a long one does not pad the others.

    Args:
        chunk: from inputs [n, heads, C, ...], zeros after a segment's end, and states [n, ...],
            to outputs [n, heads, C, channels] and states.
        inputs: [L, heads, ...] each.
        initial: [N, ...].

    Returns:
        [L, heads, channels], and the states at the segments' ends.
    """
    sizes = [
        min(CHUNK_TOKENS, tokens - first)
        for tokens in level.lengths
        for first in range(0, tokens, CHUNK_TOKENS)
    ]
    pieces = [values.split(sizes) for values in inputs]
    counts = [-(-tokens // CHUNK_TOKENS) for tokens in level.lengths]
    firsts = list(itertools.accumulate(counts, initial=0))
    states = list(initial.unbind())
    outs: dict[int, Tensor] = {}
    for k in range(max(counts)):
        own = [n for n, count in enumerate(counts) if count > k]
        at = [firsts[n] + k for n in own]
        padded = [
            pad_sequence([values[i] for i in at], batch_first=True).transpose(1, 2)
            for values in pieces
        ]
        out, ends = chunk(padded, torch.stack([states[n] for n in own]))
        for n, i, tokens, end in zip(own, at, out.transpose(1, 2), ends, strict=True):
            outs[i] = tokens[: sizes[i]]
            states[n] = end
    return torch.cat([outs[i] for i in range(len(sizes))]), torch.stack(states)


def at_least_fp32(values: Tensor) -> Tensor:
    """The values in fp32; fp64 stays."""
    return values if values.dtype == torch.float64 else values.float()


def decay_between(since_start: Tensor) -> Tensor:
    """[..., C] -> [..., C, C]: factor of token j's update at token i; 0 where j is after i."""
    size = since_start.shape[-1]
    is_later = torch.ones(size, size, dtype=torch.bool, device=since_start.device).triu(1)
    difference = since_start[..., :, None] - since_start[..., None, :]
    return difference.masked_fill(is_later, float("-inf")).exp()
