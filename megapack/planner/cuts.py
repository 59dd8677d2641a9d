"""Samples into pieces: where they are cut, over which ranks a chain lies, and at which place.

A long sample alone in its row keeps the stages behind it waiting. Cut into pieces of equal work it
goes through the pipeline as rows of usual size do. A chain is on one DP rank, or over as many as
its work needs: a sample with the work of a whole rank would leave that rank nothing beside it. The
pieces' rows have room for whole items, too. Families come in pieces already (`families`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from megapack.base.arrays import Bools, Floats, Ints
from megapack.base.jit import inner, kernel
from megapack.base.loops import largest
from megapack.layout import round_up
from megapack.planner.items import Items
from megapack.planner.scored import Way

# A sample whose work is this little above a whole number of pieces gets that number.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class CutItems:
    """Items of which some are pieces."""

    items: Items
    """The whole items are first; the pieces follow, chain after chain."""
    num_whole: int
    """Whole items."""
    sizes: Ints
    """int64 [chains]: pieces of each chain."""
    widths: Ints
    """int64 [chains]: DP ranks of each chain, an aligned block."""
    loads: Floats
    """float64 [chains]: work of each chain."""

    def cells(self, count: int, place: float) -> Ints | None:
        """Cells of the pieces if chains stand at one place of each rank's order, each in one group
        of G; None without room.

        Chains go to ranks those over most ranks first, and of these the one with the most work,
        each to the ranks with the least.

        Args:
            count: M.
            place: 0 puts chains first, 1 last.

        Returns:
            int64 [pieces]: rank * M + position, of the first rank of the chain.
        """
        order = np.lexsort((-self.loads, -self.widths))
        step = self.items.step
        group = step.group_size or count
        first = _place_chains(
            self.sizes, self.widths, self.loads, order, (step.layout.dp, count), group, place
        )
        if (first < 0).any():
            return None
        ends = np.cumsum(self.sizes)
        within = np.arange(self.sizes.sum()) - np.repeat(ends - self.sizes, self.sizes)
        return np.asarray(np.repeat(first, self.sizes) + within)


def is_alone(items: Items) -> Bools:
    """bool [I]: items of one sample that shares nothing with others, or is over the capacity. Only
    these are cut by themselves."""
    alone: Bools = items.item_samples == 1
    table = items.step.prefixes
    if table is None:
        return alone
    shares = table.place[items.samples[items.first_samples]] >= 0
    return alone & ((items.aligned > items.step.capacity) | ~shares)


def families_of(items: Items) -> tuple[Ints, Ints]:
    """The items of families in pieces, int64, and the pieces of each family, int64 [families]."""
    own = np.flatnonzero(items.is_piece)
    _, sizes = np.unique(items.chain[own], return_counts=True)
    return own, sizes


def cut_items(
    way: Way, longest: float, most: int, room: int, share: float = math.inf, widest: int = 1
) -> CutItems | None:
    """Cut samples into pieces; None if one needs more than `most`.

    Args:
        way: families may be in pieces, see `families_in_pieces`.
        longest: seconds of a piece's forward through one chunk at most, as far as `most` allows.
        most: pieces of a sample.
        room: padded tokens of the longest sample that need not be cut.
        share: the most seconds of a chain on a rank, as far as `widest` allows.
        widest: the most DP ranks of a chain.
    """
    items, work = way.items, way.work
    single = is_alone(items)
    widths = np.ones(work.size, dtype=np.int64)
    while widths.max(initial=1) < widest and (single & (work > share * widths)).any():
        widths[single & (work > share * widths)] *= 2
    wanted = np.ones(work.size)
    if longest > 0:
        wanted = np.minimum(np.ceil(work / (longest * widths) - _ROUNDING), most)
    over = single & (items.aligned > room)
    chosen = np.flatnonzero(single & ((wanted > 1) | over))
    chosen = chosen[np.lexsort((-work[chosen], -widths[chosen]))]
    num, ends = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    for width in np.unique(widths[chosen])[::-1].tolist():
        own = chosen[widths[chosen] == width]
        rule = _cut_rule(items, most, way.unit, width)
        found = _all_ends(items.aligned[own], wanted[own].astype(np.int64), rule)
        num, ends = np.append(num, found[0]), np.append(ends, found[1])
    if not num.all():
        return None
    # With a coarse alignment a sample may be one piece, which is no cut.
    ends = ends[np.repeat(num > 1, num)]
    chosen, num = chosen[num > 1], num[num > 1]
    in_families, sizes = families_of(items)
    if max(sizes.max(initial=0), num.max(initial=0)) > most:
        return None
    loads = np.zeros(sizes.size)
    np.add.at(loads, np.repeat(np.arange(sizes.size), sizes), work[in_families])
    whole = np.setdiff1d(np.arange(work.size), np.concatenate([chosen, in_families]))
    return CutItems(
        items=_with_pieces(items, whole, in_families, np.repeat(chosen, num), num, ends),
        num_whole=whole.size,
        sizes=np.append(sizes, num),
        widths=np.append(np.ones_like(sizes), widths[chosen]),
        loads=np.append(loads, work[chosen]),
    )


@kernel
def _place_chains(
    sizes: Ints,
    widths: Ints,
    loads: Floats,
    order: Ints,
    shape: tuple[int, int],
    group: int,
    place: float,
) -> Ints:
    """The first cell of each chain, see `CutItems.cells`; -1 if one finds no room.

    Args:
        shape: dp and M.
        group: micro-batches that all micro-batches of a chain are in.
    """
    dp, count = shape
    num_groups = -(-count // group)
    # Micro-batches of chains, and work of chains on each rank.
    used = np.zeros((dp, num_groups), dtype=np.int64)
    held = np.zeros(dp)
    first = np.full(sizes.size, -1, dtype=np.int64)
    wanted = place * (num_groups - 1)
    for chain in order:
        width = widths[chain]
        best, best_group, best_start = -1, 0, 0
        least = np.inf
        for rank in range(0, dp - width + 1, width):
            load = largest(held[rank : rank + width])
            if load >= least:
                continue
            # The nearest group with room on all ranks.
            nearest = np.inf
            for g in range(num_groups):
                start = 0
                for r in range(rank, rank + width):
                    start = max(start, used[r, g])
                room = min(group, count - g * group) - start
                if room >= sizes[chain] and abs(g - wanted) < nearest:
                    nearest = abs(g - wanted)
                    least = load
                    best, best_group, best_start = rank, g, start
        if best < 0:
            return np.full(sizes.size, -1, dtype=np.int64)
        for r in range(best, best + width):
            used[r, best_group] = best_start + sizes[chain]
            held[r] += loads[chain] / width
        first[chain] = best * count + best_group * group + best_start
    if num_groups == 1:
        # All chains follow each other, as far towards the end as the place says. One over several
        # ranks begins at the same place on each, so then all ranks are shifted as the fullest one.
        most = 0
        for r in range(dp if (widths > 1).any() else 0):
            most = max(most, used[r, 0])
        for chain in order:
            free = count - max(most, used[first[chain] // count, 0])
            first[chain] += int(np.rint(place * free))
    return first


class _CutRule(NamedTuple):
    """Where samples may be cut."""

    per_token: float
    per_token_sq: float
    most: int
    """Pieces of a sample."""
    unit: int
    """Cuts are at multiples of so many tokens."""
    least: int
    """Padded tokens of a piece, at least."""
    room: int
    """And at most."""


def _cut_rule(items: Items, most: int, unit: int, width: int) -> _CutRule:
    step = items.step
    cost = step.cost
    unit = math.lcm(unit, step.layout.over(width).sample_alignment)
    least = round_up(step.least_piece, unit)
    room = step.capacity * width // unit * unit
    return _CutRule(float(cost.per_token), float(cost.per_token_sq), most, unit, least, room)


@kernel
def _all_ends(lengths: Ints, wanted: Ints, rule: _CutRule) -> tuple[Ints, Ints]:
    """Where the pieces of samples end, in padded tokens: int64 [n], pieces of each sample, and
    int64 [their sum], their ends. 0 pieces: more than `most` are needed.

    Args:
        lengths: int64 [n], padded tokens.
        wanted: int64 [n], pieces of equal work; there are more where the capacity makes them
            shorter, and fewer where they would be too short.
    """
    # Twice, first for the numbers: `most` ends for each sample could be gigabytes.
    num = np.empty(lengths.size, np.int64)
    own = np.empty(rule.most, np.int64)
    for i in range(lengths.size):
        num[i] = _ends(lengths[i], wanted[i], rule, own)
    ends = np.empty(num.sum(), np.int64)
    start = 0
    for i in range(lengths.size):
        if num[i] > 0:
            _ends(lengths[i], wanted[i], rule, own)
            ends[start : start + num[i]] = own[: num[i]]
            start += num[i]
    return num, ends


@inner
def _ends(length: int, wanted: int, rule: _CutRule, ends: Ints) -> int:
    """Write the ends of a sample's pieces to `ends`, int64 [most]; returns how many, see
    `_all_ends`."""
    unit = rule.unit
    num = 0
    start = 0
    while start < length and num < rule.most and rule.room > 0:
        part = _part_at(rule, length, start) + 1 / wanted
        end = length
        # Half a piece more is not worth a piece.
        if part < 1 - 0.5 / wanted:
            end = int(np.rint(_cut_at(rule, length, part) / unit)) * unit
        end = min(max(end, start + rule.least), start + rule.room)
        if length - end < rule.least:
            # The rest is no piece of its own: it goes to this one, or gets some of its tokens.
            end = length if length - start <= rule.room else (length - rule.least) // unit * unit
        start = end
        ends[num] = start
        num += 1
    return num if start == length else 0


@inner
def _part_at(rule: _CutRule, length: int, tokens: int) -> float:
    """The part of a sample's work that its first tokens have; the inverse of `_cut_at`."""
    a = rule.per_token
    b = rule.per_token_sq
    whole = a * length + b * length * length
    return (a * tokens + b * tokens * tokens) / whole if whole > 0 else tokens / length


@inner
def _cut_at(rule: _CutRule, length: int, part: float) -> float:
    """The tokens that have this part of a sample's work: the root of a*x + b*x^2 = part * work."""
    a = rule.per_token
    b = rule.per_token_sq
    work = part * (a * length + b * length * length)
    root = math.sqrt(a * a + 4 * b * work)
    return 2 * work / (a + root) if a + root > 0 else part * length


def _with_pieces(
    items: Items, whole: Ints, families: Ints, cut: Ints, num: Ints, ends: Ints
) -> Items:
    """The whole items, those of families in pieces, and the pieces of samples.

    Args:
        cut, ends: int64 [P], the item of each piece and where it ends.
        num: int64 [chains], pieces of each sample that is cut.
    """
    item_of = np.concatenate([whole, families, cut])
    kept = whole.size + families.size
    taken = items.take(item_of)
    begin, end, chain = taken.begin.copy(), taken.end.copy(), taken.chain.copy()
    first = int(items.chain.max()) + 1
    chain[kept:] = np.repeat(first + np.arange(num.size), num)
    end[kept:] = ends
    # A piece begins where the one before it ends, and the first piece of a sample at 0.
    begin[kept + 1 :] = ends[:-1]
    begin[kept + np.cumsum(num) - num] = 0
    is_cut = np.arange(item_of.size) >= kept
    real_end = np.minimum(end, taken.lengths)
    return replace(
        taken,
        lengths=np.where(is_cut, real_end - begin, taken.lengths),
        aligned=np.where(is_cut, end - begin, taken.aligned),
        aligned_sq=np.where(is_cut, end * end - begin * begin, taken.aligned_sq),
        begin=begin,
        end=end,
        chain=chain,
    )
