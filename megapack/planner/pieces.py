"""Samples into pieces: where they are cut, over which ranks a chain lies, and at which place.

A long sample alone in its row keeps the stages behind it waiting. Cut into pieces of equal work it
goes through the pipeline as rows of usual size do. A chain is on one DP rank, or over as many as
its work needs: a sample with the work of a whole rank would leave that rank nothing beside it. The
pieces' rows have room for whole items, too. Families come in pieces already (`families`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from megapack.base.arrays import Bools, Floats, Ints
from megapack.base.jit import kernel
from megapack.layout import round_up
from megapack.planner.bins import pack_to_targets
from megapack.planner.board import Board, RowCost, put_pieces
from megapack.planner.draft import PADDING, Draft
from megapack.planner.fill import FillRule, fill_all, fill_rule
from megapack.planner.items import Items
from megapack.planner.profile import ramp_levels
from megapack.planner.scored import blank_board

# All constants of this module were chosen by hand. docs/planner.md measures the whole search.

# Limit on passes of `_targets`.
_FILL_PASSES = 8
# A whole item may take this many times its position's target before it goes over more ranks.
_STRETCH = 1.15
# A sample whose work is this little above a whole number of pieces gets that number.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class CutItems:
    """Items of which some are pieces, and the rank of each chain."""

    items: Items
    """The whole items are first; the pieces follow, chain after chain."""
    num_whole: int
    """Whole items."""
    sizes: tuple[int, ...]
    """Pieces of each chain."""
    widths: tuple[int, ...]
    """DP ranks of each chain, an aligned block."""
    ranks: tuple[tuple[int, ...], ...]
    """The chains of each DP rank: those of most ranks first, and of these the one with the most
    work."""
    work: Floats
    """float64 [I]: seconds of each item's forward through one chunk."""


def item_seconds(items: Items) -> Floats:
    """float64 [I]: seconds of each item's forward through one chunk, without `fixed`."""
    cost = items.step.real_cost
    return np.asarray(items.work_by(cost) * cost.share_of_rank(items.step.layout))


def is_alone(items: Items) -> Bools:
    """bool [I]: items of one sample that shares nothing with others, or is over the capacity. Only
    these are cut by themselves."""
    alone: Bools = items.item_samples == 1
    table = items.step.prefixes
    if table is None:
        return alone
    shares = table.place[items.samples[items.first_samples]] >= 0
    return alone & ((items.aligned > items.step.capacity) | ~shares)


def cut_items(
    items: Items,
    count: int,
    longest: float,
    most: int,
    room: int,
    unit: int,
    share: float = math.inf,
    widest: int = 1,
) -> CutItems | None:
    """Cut samples into pieces; None if a chain finds no rank with room.

    Chains go to ranks with the most work first, each to the rank with the least.

    Args:
        items: families may be in pieces, see `families_in_pieces`.
        count: M.
        longest: seconds of a piece's forward through one chunk at most, as far as `most` allows.
        most: pieces of a sample.
        room: padded tokens of the longest sample that need not be cut.
        unit: cuts are at multiples of so many tokens.
        share: the most seconds of a chain on a rank, as far as `widest` allows.
        widest: the most DP ranks of a chain.
    """
    work = item_seconds(items)
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
    found = []
    for width in np.unique(widths[chosen])[::-1].tolist():
        own = chosen[widths[chosen] == width]
        rule = _cut_rule(items, most, unit, width)
        found.append(_all_ends(items.aligned[own], wanted[own].astype(np.int64), rule))
    num = np.concatenate([np.zeros(0, dtype=np.int64), *(own for own, _ in found)])
    ends = np.concatenate([np.zeros(0, dtype=np.int64), *(own for _, own in found)])
    if not num.all():
        return None
    # With a coarse alignment a sample may be one piece, which is no cut.
    ends = ends[np.repeat(num > 1, num)]
    chosen, num = chosen[num > 1], num[num > 1]
    families = _families(items)
    sizes = [*map(len, families), *num.tolist()]
    loads = [math.fsum(work[own].tolist()) for own in families] + work[chosen].tolist()
    over_ranks = [1] * len(families) + widths[chosen].tolist()
    ranks = _ranks_of_chains(sizes, loads, over_ranks, items.step.layout.dp, count)
    if ranks is None or max(sizes, default=0) > most:
        return None
    in_families = np.concatenate([np.zeros(0, dtype=np.int64), *families])
    whole = np.setdiff1d(np.arange(work.size), np.concatenate([chosen, in_families]))
    cut = _with_pieces(items, whole, in_families, np.repeat(chosen, num), num, ends)
    return CutItems(
        items=cut,
        num_whole=whole.size,
        sizes=tuple(sizes),
        widths=tuple(over_ranks),
        ranks=ranks,
        work=item_seconds(cut),
    )


def _families(items: Items) -> list[Ints]:
    """The items of each family in pieces, in their order."""
    own = np.flatnonzero(items.is_piece)
    chains = np.split(own, np.flatnonzero(np.diff(items.chain[own])) + 1)
    return chains if own.size else []


def family_rows(items: Items) -> int:
    """Micro-batches of the rank that has most for families in pieces; 0 without any."""
    families = _families(items)
    sizes = list(map(len, families))
    work = item_seconds(items)
    loads = [math.fsum(work[own].tolist()) for own in families]
    ranks = _ranks_of_chains(sizes, loads, [1] * len(sizes), items.step.layout.dp, sum(sizes))
    return max(sum(sizes[chain] for chain in chains) for chains in ranks or ((),))


def _ranks_of_chains(
    sizes: Sequence[int], loads: Sequence[float], widths: Sequence[int], dp: int, count: int
) -> tuple[tuple[int, ...], ...] | None:
    """The chains of each rank; None if one finds no rank with room.

    Args:
        sizes, loads, widths: micro-batches, work and DP ranks of each chain.
        count: M.
    """
    ranks: list[list[int]] = [[] for _ in range(dp)]
    rows = [0] * dp
    held = [0.0] * dp
    order = sorted(range(len(sizes)), key=lambda chain: (-widths[chain], -loads[chain]))
    num_wide = sum(width > 1 for width in widths)
    for chain in order[:num_wide]:
        width, size = widths[chain], sizes[chain]
        blocks = [range(rank, rank + width) for rank in range(0, dp - width + 1, width)]
        blocks = [block for block in blocks if max(rows[r] for r in block) + size <= count]
        if not blocks:
            return None
        for rank in min(blocks, key=lambda block: (max(held[r] for r in block), block[0])):
            ranks[rank].append(chain)
            rows[rank] += size
            held[rank] += loads[chain] / width
    # A min-heap of ranks by work, then by number.
    lightest = [(held[rank], rank) for rank in range(dp) if rows[rank] < count]
    heapq.heapify(lightest)
    for chain in order[num_wide:]:
        full = []
        while lightest and rows[lightest[0][1]] + sizes[chain] > count:
            full.append(heapq.heappop(lightest))
        if not lightest:
            return None
        work, rank = heapq.heappop(lightest)
        ranks[rank].append(chain)
        rows[rank] += sizes[chain]
        for entry in (*full, (work + loads[chain], rank)):
            if rows[entry[1]] < count:
                heapq.heappush(lightest, entry)
    return tuple(map(tuple, ranks))


def chain_cells(cut: CutItems, count: int, place: float) -> Ints | None:
    """Cells of the pieces if chains stand at one place of each rank's order, each in one group of
    G; None without room.

    Args:
        count: M.
        place: 0 puts chains first, 1 last; where some lie over several ranks, those of the rank
            that has the most pieces.

    Returns:
        int64 [pieces]: rank * M + position, of the first rank of the chain.
    """
    group = cut.items.step.group_size
    cells = np.empty(sum(cut.sizes), dtype=np.int64)
    firsts = np.cumsum((0, *cut.sizes))
    is_wide = max(cut.widths, default=1) > 1
    most = max(sum(cut.sizes[c] for c in chains) for chains in cut.ranks)
    for rank, chains in enumerate(cut.ranks):
        sizes = [cut.sizes[c] for c in chains]
        # A chain of several ranks begins at the same place on each.
        starts = _starts(sizes, count, group, place, most if is_wide else sum(sizes))
        if starts is None:
            return None
        for chain, start in zip(chains, starts, strict=True):
            if rank % cut.widths[chain]:
                continue
            size = cut.sizes[chain]
            cell = rank * count + start
            cells[firsts[chain] : firsts[chain] + size] = np.arange(cell, cell + size)
    return cells


def pack_around(cut: CutItems, cells: Ints, count: int) -> Draft | None:
    """A draft of rows on one DP rank each; None if items find no room.

    Args:
        cells: of the pieces, see `chain_cells`.
        count: M.
    """
    items = cut.items
    step = items.step
    dp = step.layout.dp
    taken = np.zeros(dp * count, dtype=np.int64)
    taken[cells] = items.aligned[cut.num_whole :]
    # All rows of a chain are live at once: those of a sample over the budget get nothing else.
    sample_tokens = np.zeros(len(cut.sizes), dtype=np.int64)
    chain_of = items.chain[cut.num_whole :]
    np.maximum.at(sample_tokens, chain_of, items.end[cut.num_whole :])
    taken[cells[sample_tokens[chain_of] > step.capacity]] = step.capacity
    held = np.zeros(dp * count)
    held[cells] = cut.work[cut.num_whole :]
    rank_work = math.fsum(cut.work.tolist()) / dp
    levels = _levels(items, count)
    targets = [_targets(own, rank_work, levels) for own in held.reshape(dp, count)]
    missing = np.concatenate(targets) - held
    whole = slice(cut.num_whole)
    found = pack_to_targets(items.aligned[whole], cut.work[whole], missing, step.capacity, taken)
    if found is None:
        return None
    row_of = np.concatenate([found, cells])
    used = np.unique(row_of)
    if used.size < dp * count and step.policy.unreachable != "pad":
        return None
    number = np.full(dp * count, PADDING, dtype=np.int64)
    number[used] = np.arange(used.size)
    return Draft(
        items=items,
        row_of=number[row_of],
        rank_rows=tuple(number.reshape(dp, count)),
    )


def fill_around(
    cut: CutItems, cells: Ints, costs: RowCost, count: int, *, widens: bool
) -> tuple[Board, FillRule] | None:
    """A board whose whole items may lie over several DP ranks, and its rule; None if items find no
    room.

    Args:
        cells: of the pieces, see `chain_cells`.
        costs: of rows of all widths that are allowed.
        count: M.
        widens: whether items may lie over more ranks than they need.
    """
    items = cut.items
    dp = items.step.layout.dp
    board = blank_board(items, costs, count)
    levels = np.repeat([width.bit_length() - 1 for width in cut.widths], cut.sizes)
    put_pieces(board, cut.num_whole, cells, levels.astype(np.int64))
    rule = fill_rule(items, costs, cut.work)
    if rule is None:
        return None
    rank_work = math.fsum(cut.work.tolist()) / dp
    rule = FillRule(
        order=rule.order[rule.order < cut.num_whole],
        least=rule.least,
        targets=_targets(np.zeros(count), rank_work, _levels(items, count)) + costs.fixed[0],
        most=rule.most if widens else rule.least,
    )
    return (board, rule) if fill_all(board, rule, _STRETCH) else None


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
    cost = step.real_cost
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


@kernel
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


@kernel
def _part_at(rule: _CutRule, length: int, tokens: int) -> float:
    """The part of a sample's work that its first tokens have; the inverse of `_cut_at`."""
    a = rule.per_token
    b = rule.per_token_sq
    whole = a * length + b * length * length
    return (a * tokens + b * tokens * tokens) / whole if whole > 0 else tokens / length


@kernel
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


def _starts(
    sizes: Sequence[int], count: int, group: int | None, place: float, most: int
) -> list[int] | None:
    """Where the chains of a rank begin; None if they do not fit.

    With 1F1B they follow each other. In groups, each goes to the one nearest to the place that has
    room.

    Args:
        most: micro-batches that chains take on the rank with the most of them.
    """
    if group is None:
        first = round(place * (count - most))
        return [first + sum(sizes[:k]) for k in range(len(sizes))]
    room = [min(group, count - first) for first in range(0, count, group)]
    wanted = place * (len(room) - 1)
    starts = []
    for size in sizes:
        fitting = [g for g, free in enumerate(room) if free >= size]
        if not fitting:
            return None
        best = min(fitting, key=lambda g: (abs(g - wanted), g))
        starts.append(min((best + 1) * group, count) - room[best])
        room[best] -= size
    return starts


def _levels(items: Items, count: int) -> Floats:
    """Levels of a rank's M rows."""
    step = items.step
    drains = step.policy.backward == "joint" or step.forward_only
    return ramp_levels(count, step.layout.pp, drains=drains)


def _targets(held: Floats, work: float, levels: Floats) -> Floats:
    """Work that each row of a rank should have by its level, at least what it holds.

    With 5 rows of level 1, 10 s of work and a piece of 4 s in the third one, the others share 6 s.
    """
    count = held.size
    over = np.zeros(count, dtype=np.bool_)
    targets = held.copy()
    for _ in range(_FILL_PASSES):
        rest = work - float(held[over].sum())
        if rest <= 0 or over.all():
            break
        targets = np.where(over, held, levels * (rest / float(levels[~over].sum())))
        more = ~over & (held > targets)
        if not more.any():
            break
        over |= more
    return np.maximum(targets, held)
