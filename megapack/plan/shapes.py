"""Few row lengths: shapes that all rows of a run have, for captured graphs and compiled kernels.

    rows of a plan without shapes -> choose_lengths -> RowShapes -> the plan, whose rows have them

A graph is captured for one shape: a number of tokens on each GPU, of segments in `cu_seqlens`, and
of tokens of the longest sample, which kernels take as an integer. Rows are padded to the first
with dummy samples, and `cu_seqlens` to the second with segments of length 0.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from megapack.base.arrays import Ints
from megapack.errors import ConfigError, PlanError
from megapack.layout import Layout, round_up
from megapack.plan.microbatch import MicroBatch
from megapack.policy import Policy
from megapack.prefixes import PrefixTable, dummy_spans, row_branches

# Rows of later steps are longer and shorter than those that the lengths are chosen by: each counts
# as several, of these percents of its length. Without that, rows of equal work that become 1 %
# longer would all need the next length. Chosen by hand on the traces of docs/planner.md.
_SPREAD = (85, 90, 95, 100, 105, 110, 115)


class RowShape(NamedTuple):
    """What all rows of a shape have in common."""

    tokens: int
    """Row tokens on each GPU, after CP; a row over two DP ranks is twice as long."""
    segments: int = 1
    """Segments of `cu_seqlens`: samples, branches and dummies, and then empty ones."""
    longest: int = 1
    """At least the tokens of the longest segment, from its sample's beginning, on each GPU."""


@dataclass(frozen=True)
class RowShapes:
    """The shapes of a run, by ascending tokens.

    Raises:
        ConfigError: there is no shape, or tokens do not ascend from 1.
    """

    shapes: tuple[RowShape, ...]
    num_steps: int = 0
    """Optimizer steps that were planned with these lengths before the plan that has them."""

    def __post_init__(self) -> None:
        ends = [0, *self.tokens]
        if len(ends) == 1 or any(a >= b for a, b in itertools.pairwise(ends)):
            raise ConfigError(f"row shapes of {ends[1:]} tokens; give ascending lengths from 1")

    @classmethod
    def from_payload(cls, payload: Mapping[str, Any]) -> RowShapes:
        """The shapes of `dataclasses.asdict`, read from JSON."""
        shapes = tuple(RowShape(*shape) for shape in payload["shapes"])
        return cls(shapes, payload["num_steps"])

    @property
    def tokens(self) -> tuple[int, ...]:
        """The row lengths per GPU."""
        return tuple(shape.tokens for shape in self.shapes)

    def __str__(self) -> str:
        """For messages, such as "4096 tokens in 16 segments of up to 2048, 8192 tokens in ..."."""
        return ", ".join(
            f"{tokens} tokens in {segments} segments of up to {longest}"
            for tokens, segments, longest in self.shapes
        )

    def check(self, layout: Layout, policy: Policy) -> None:
        """Raise ConfigError if a length is not aligned."""
        unit = _unit(layout, policy)
        bad = [tokens for tokens in self.tokens if tokens % unit]
        if bad:
            raise ConfigError(
                f"a row shape of {bad[0]} tokens per GPU is no multiple of the row alignment of "
                f"{unit}; set {round_up(bad[0], unit)}"
            )

    def of(self, row: MicroBatch, layout: Layout) -> RowShape:
        """The shape of a row.

        Raises:
            PlanError: it has none.
        """
        tokens, rest = divmod(row.row_tokens, layout.cp * row.width)
        found = dict(zip(self.tokens, self.shapes, strict=True)).get(tokens)
        if rest or found is None:
            raise PlanError(
                f"a row of {row.row_tokens} tokens over {layout.cp * row.width} GPUs has none of "
                f"the lengths {list(self.tokens)} per GPU"
            )
        return found

    def holding(
        self, rows: Iterable[MicroBatch], lengths: Ints, layout: Layout, table: PrefixTable | None
    ) -> RowShapes:
        """The shapes with as many segments, and as long ones, as the rows of a plan need.

        Both grow to powers of two, and a longer shape has at least those of shorter ones. So they
        change at most log2(tokens) times in a run.
        """
        grown = {shape.tokens: shape for shape in self.shapes}
        for row in rows:
            tokens = self.of(row, layout).tokens
            segments, end = _needs(row, lengths, layout, table)
            # A piece may end further from its sample's beginning than the row is long.
            needed = RowShape(tokens, _power(segments), min(_power(end), max(tokens, end)))
            grown[tokens] = RowShape(*map(max, grown[tokens], needed))
        shapes = itertools.accumulate(
            grown.values(), lambda shorter, own: RowShape(*map(max, shorter, own))
        )
        return replace(self, shapes=tuple(shapes))

    def after(self, num_steps: int) -> RowShapes:
        """The same when so many steps more have been planned."""
        return replace(self, num_steps=self.num_steps + num_steps)

    @classmethod
    def choose(
        cls, rows: Iterable[MicroBatch], layout: Layout, policy: Policy, most: int, longest: int
    ) -> RowShapes:
        """At most `most` lengths, with which rows like these are padded the least.

        Args:
            rows: those of a plan, of any length.
            longest: tokens per DP rank of the longest row that there may be; rows of later plans
                are at most as long, so that they need no other lengths.
        """
        unit = _unit(layout, policy)
        top = max(longest // layout.cp // unit, 1) * unit
        # On each GPU: a row over two DP ranks is two of them.
        own = [-(-row.row_tokens // (layout.cp * row.width)) for row in rows for _ in row.ranks(0)]
        lengths = [
            min(round_up(-(-tokens * percent // 100), unit), top)
            for tokens in own
            for percent in _SPREAD
        ]
        return cls(tuple(map(RowShape, choose_lengths(lengths, most, top))))


def choose_lengths(lengths: Iterable[int], most: int, longest: int) -> list[int]:
    """At most `most` lengths, `longest` among them, that pad rows the least, ascending.

    A row is padded to the shortest of them that is not below its own length. This is the assortment
    problem of one dimension (D. W. Pentico, "The assortment problem: A survey", 2008). The dynamic
    programme is that of G. Sadowski, "A few remarks on the assortment problem", 1959: with n_j rows
    up to length l_j, the rows up to l_j take at least

        D_k[j] = min over i < j of D_k-1[i] + (n_j - n_i) * l_j

    tokens if l_j is one of k lengths. For each k the terms D_k-1[i] - n_i * l are lines in l, whose
    slopes fall as i grows; their lower envelope gives all minima in one pass. So it takes
    most * lengths steps after sorting, in integers.

    Args:
        lengths: of the rows, none above `longest`.

    >>> choose_lengths([5, 6, 6, 9, 10], 2, 12)
    [6, 12]
    """
    found, counts = np.unique([*lengths, longest], return_counts=True)
    counts[-1] -= 1
    sizes, numbers = found.tolist(), np.cumsum(counts).tolist()
    best = [number * size for number, size in zip(numbers, sizes, strict=True)]
    rounds = []
    for _ in range(min(most, len(sizes)) - 1):
        best, before = _one_more(sizes, numbers, best)
        rounds.append(before)
    last = len(sizes) - 1
    chosen = [last]
    for before in reversed(rounds):
        last = before[last]
        if last != chosen[-1]:
            chosen.append(last)
    return [sizes[j] for j in reversed(chosen)]


def _one_more(
    sizes: Sequence[int], numbers: Sequence[int], best: Sequence[int]
) -> tuple[list[int], list[int]]:
    """D_k of D_k-1, and for each length the one chosen before it, or itself if that is no gain."""

    def value(i: int, size: int) -> int:
        return best[i] - numbers[i] * size

    # The lengths whose lines are the envelope from the current length on.
    lines: deque[int] = deque()
    after = list(best)
    before = list(range(len(sizes)))
    for j, size in enumerate(sizes):
        while len(lines) > 1 and value(lines[1], size) <= value(lines[0], size):
            lines.popleft()
        if lines:
            total = value(lines[0], size) + numbers[j] * size
            if total < best[j]:
                after[j], before[j] = total, lines[0]
        while len(lines) > 1:
            a, b = lines[-2], lines[-1]
            # The line of b is nowhere below those of a and j.
            left = (best[j] - best[a]) * (numbers[b] - numbers[a])
            if left > (best[b] - best[a]) * (numbers[j] - numbers[a]):
                break
            lines.pop()
        lines.append(j)
    return after, before


def _needs(
    row: MicroBatch, lengths: Ints, layout: Layout, table: PrefixTable | None
) -> tuple[int, int]:
    """Segments of a row, and tokens per GPU of the longest, from its sample's beginning."""
    layout = layout.over(row.width)
    own = lengths[list(row.samples)]
    if row.shared_tokens or row.pieces:
        table = None if table is None else table.over(row.width)
        branches = row_branches(row.samples, own.tolist(), layout, table, row.pieces)
        spans = [branch.tokens for branch in branches]
        ends = [branch.offset + branch.tokens for branch in branches]
    else:
        ends = spans = layout.aligned_sample_tokens(own).tolist()
    dummies = dummy_spans(row.row_tokens - sum(spans), layout.sample_alignment)
    return len(spans) + len(dummies), -(-max(*ends, *dummies, 1, 1) // layout.cp)


def _unit(layout: Layout, policy: Policy) -> int:
    """Row lengths per GPU are a multiple of this, in rows over any number of DP ranks."""
    rounded = layout.rounding(policy.round_row_tokens)
    overs = [rounded.over(width) for width in policy.widths(layout)]
    return math.lcm(*(over.row_alignment // over.cp for over in overs))


def _power(number: int) -> int:
    """The smallest power of two that is not below it."""
    return 1 << (number - 1).bit_length()
