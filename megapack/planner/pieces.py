"""Long samples into pieces: where they are cut, on which rank a chain is, and at which place.

A long sample alone in its row keeps the stages behind it waiting. Cut into pieces of equal work it
goes through the pipeline as rows of usual size do. Its chain is on one DP rank; the pieces' rows
have room for whole items, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megapack.base.arrays import Bools, Floats, Ints
from megapack.cost.model import CostModel
from megapack.planner.bins import pack_to_targets
from megapack.planner.draft import PADDING, Draft
from megapack.planner.items import Items, Pieces

# All constants of this module were chosen by hand. docs/planner.md measures the whole search.

# Limit on passes of `_targets`.
_FILL_PASSES = 8
# Levels of the first two and the last two rows, relative to those in the middle, as in `profile`.
_HEAD = (0.4, 0.65)
_TAIL = (0.85, 0.65)
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
    ranks: tuple[tuple[int, ...], ...]
    """The chains of each DP rank, the one with the most work first."""
    work: Floats
    """float64 [I]: seconds of each item's forward through one chunk."""


def item_seconds(items: Items) -> Floats:
    """float64 [I]: seconds of each item's forward through one chunk, without `fixed`."""
    cost = items.step.real_cost
    return np.asarray(items.work_by(cost) * cost.share_of_rank(items.step.layout))


def may_cut(items: Items) -> bool:
    """Whether samples may be cut at all."""
    step = items.step
    return step.policy.split_samples == "auto" and step.budget is not None


def is_alone(items: Items) -> Bools:
    """bool [I]: items of one sample that shares nothing with others. Only these are cut."""
    alone: Bools = items.item_samples == 1
    table = items.step.prefixes
    return alone if table is None else alone & (table.place[items.samples[items.first_samples]] < 0)


def cut_items(items: Items, count: int, longest: float, most: int) -> CutItems | None:
    """Cut samples into pieces; None if a chain finds no rank with room.

    Chains go to ranks with the most work first, each to the rank with the least.

    Args:
        count: M.
        longest: seconds of a piece's forward through one chunk at most, as far as `most` allows.
        most: pieces of a sample.
    """
    work = item_seconds(items)
    wanted = np.ones(work.size)
    if longest > 0:
        wanted = np.minimum(np.ceil(work / longest - _ROUNDING), most)
    single = is_alone(items)
    over = single & (items.aligned > items.step.capacity)
    chosen = np.flatnonzero(single & ((wanted > 1) | over))
    chosen = chosen[np.argsort(-work[chosen], kind="stable")]
    dp = items.step.layout.dp
    cuts: list[list[int]] = []
    ranks: list[list[int]] = [[] for _ in range(dp)]
    rows = [0] * dp
    loads = [0.0] * dp
    for item in chosen.tolist():
        ends = _ends(items, item, int(wanted[item]), most)
        free = [r for r in range(dp) if ends is not None and rows[r] + len(ends) <= count]
        if ends is None or not free:
            return None
        rank = min(free, key=lambda r: (loads[r], r))
        ranks[rank].append(len(cuts))
        rows[rank] += len(ends)
        loads[rank] += float(work[item])
        cuts.append(ends)
    whole = np.setdiff1d(np.arange(work.size), chosen)
    cut = _with_pieces(items, whole, chosen.tolist(), cuts)
    return CutItems(
        items=cut,
        num_whole=whole.size,
        sizes=tuple(map(len, cuts)),
        ranks=tuple(map(tuple, ranks)),
        work=item_seconds(cut),
    )


def place_chains(cut: CutItems, count: int, group: int | None, place: float) -> Draft | None:
    """A draft whose chains stand at one place of each rank's order; None if items find no room.

    Args:
        count: M.
        group: G; None with vpp=1. Each chain is in one group.
        place: 0 puts chains first, 1 last.
    """
    items = cut.items
    step = items.step
    dp = step.layout.dp
    row_of = np.full(items.num_items, PADDING, dtype=np.int64)
    firsts = cut.num_whole + np.cumsum((0, *cut.sizes))
    for rank, chains in enumerate(cut.ranks):
        starts = _starts([cut.sizes[c] for c in chains], count, group, place)
        if starts is None:
            return None
        for chain, start in zip(chains, starts, strict=True):
            size = cut.sizes[chain]
            row = rank * count + start
            row_of[firsts[chain] : firsts[chain] + size] = np.arange(row, row + size)
    rows = row_of[cut.num_whole :]
    taken = np.zeros(dp * count, dtype=np.int64)
    taken[rows] = items.aligned[cut.num_whole :]
    # All rows of a chain are live at once: those of a sample over the budget get nothing else.
    assert items.pieces is not None
    sample_tokens = np.zeros(len(cut.sizes), dtype=np.int64)
    chain_of = items.pieces.chain[cut.num_whole :]
    np.maximum.at(sample_tokens, chain_of, items.pieces.end[cut.num_whole :])
    taken[rows[sample_tokens[chain_of] > step.capacity]] = step.capacity
    held = np.zeros(dp * count)
    held[rows] = cut.work[cut.num_whole :]
    rank_work = math.fsum(cut.work.tolist()) / dp
    targets = [_targets(own, rank_work) for own in held.reshape(dp, count)]
    missing = np.concatenate(targets) - held
    whole = slice(cut.num_whole)
    found = pack_to_targets(items.aligned[whole], cut.work[whole], missing, step.capacity, taken)
    if found is None:
        return None
    row_of[whole] = found
    used = np.unique(row_of)
    if used.size < dp * count and step.policy.unreachable != "pad":
        return None
    number = np.full(dp * count, PADDING, dtype=np.int64)
    number[used] = np.arange(used.size)
    return Draft(
        items=items,
        row_of=number[row_of],
        rank_rows=tuple(number.reshape(dp, count)),
        group_size=group,
    )


def _ends(items: Items, item: int, num: int, most: int) -> list[int] | None:
    """Where the pieces of a sample end, in padded tokens: `num` pieces of equal work, and more
    where the capacity makes them shorter; None if so many are too many."""
    cost = items.step.real_cost
    length = int(items.aligned[item])
    unit = items.step.layout.sample_alignment
    room = items.step.capacity // unit * unit
    ends: list[int] = []
    start = 0
    while start < length and len(ends) < most and room > 0:
        part = _part_at(cost, length, start) + 1 / num
        end = length
        # Half a piece more is not worth a piece.
        if part < 1 - 0.5 / num:
            end = round(_cut_at(cost, length, part) / unit) * unit
        start = min(max(end, start + unit), start + room, length)
        ends.append(start)
    return ends if start == length else None


def _part_at(cost: CostModel, length: int, tokens: int) -> float:
    """The part of a sample's work that its first tokens have; the inverse of `_cut_at`."""
    a = float(cost.per_token)
    b = float(cost.per_token_sq)
    whole = a * length + b * length * length
    return (a * tokens + b * tokens * tokens) / whole if whole > 0 else tokens / length


def _cut_at(cost: CostModel, length: int, part: float) -> float:
    """The tokens that have this part of a sample's work: the root of a*x + b*x^2 = part * work."""
    a = float(cost.per_token)
    b = float(cost.per_token_sq)
    work = part * (a * length + b * length * length)
    root = math.sqrt(a * a + 4 * b * work)
    return 2 * work / (a + root) if a + root > 0 else part * length


def _with_pieces(
    items: Items, whole: Ints, chosen: Sequence[int], cuts: Sequence[Sequence[int]]
) -> Items:
    """The whole items and the pieces of the others."""
    sizes = [len(ends) for ends in cuts]
    item_of = np.concatenate([whole, np.repeat(np.array(chosen, dtype=np.int64), sizes)])
    chain = np.full(item_of.size, -1, dtype=np.int64)
    chain[whole.size :] = np.repeat(np.arange(len(sizes)), sizes)
    start = np.zeros(item_of.size, dtype=np.int64)
    end = items.aligned[item_of]
    flat = [pair for ends in cuts for pair in zip((0, *ends[:-1]), ends, strict=True)]
    if flat:
        start[whole.size :], end[whole.size :] = np.array(flat, dtype=np.int64).T
    is_piece = chain >= 0
    real_end = np.minimum(end, items.lengths[item_of])
    return replace(
        items.take(item_of),
        lengths=np.where(is_piece, real_end - start, items.lengths[item_of]),
        aligned=end - start,
        aligned_sq=np.where(is_piece, end * end - start * start, items.aligned_sq[item_of]),
        pieces=Pieces(start, end, chain),
    )


def _starts(sizes: Sequence[int], count: int, group: int | None, place: float) -> list[int] | None:
    """Where the chains of a rank begin; None if they do not fit.

    With 1F1B they follow each other. In groups, each goes to the one nearest to the place that has
    room.
    """
    if group is None:
        first = round(place * (count - sum(sizes)))
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


def _targets(held: Floats, work: float) -> Floats:
    """Work that each row of a rank should have: that of a mountain, at least what it holds.

    With 5 rows, 10 s of work and a piece of 4 s in the third one, the others share 6 s.
    """
    count = held.size
    levels = np.ones(count)
    near = min(2, (count - 1) // 2)
    levels[:near] = _HEAD[:near]
    levels[count - near :] = _TAIL[2 - near :]
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
