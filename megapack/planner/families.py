"""Families into parts, and in pieces: which samples of a family are packed as one item.

A family is the items of a step whose samples have a beginning in common. Each part of it that is in
a row of its own holds that beginning again. So a part should be large; but a row must hold it, and
large items are hard to balance. `cut_families` makes the parts for one limit, and the planner
tries several limits. A family in pieces is cut where its common beginning ends: one row has that,
and the rows after it attend to it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from megapack.base.arrays import Bools, Floats, Ints
from megapack.base.jit import inner, kernel
from megapack.planner.counts import fewest_counts
from megapack.planner.items import Items, row_sums
from megapack.planner.step import UNLIMITED

# Cuts into as many parts as these multiples of the fewest micro-batches are tried: 16 families on
# dp2 x pp4 x vpp2 may be 16, 24 or 32 parts, for M = 8, 12 or 16. Without a pipeline rows may be as
# large as the budget: the first alone.
_MULTIPLES = (1.0, 1.5, 2.0)
# With a pipeline also cuts at these fractions of a mean row's work at the fewest micro-batches: of
# short prompts, whose families are many small parts then.
_FRACTIONS = (1.0, 0.5, 0.25)
# Bisections of the limit that gives so many parts: it is then within 1/4096 of the largest one.
_LIMIT_BISECTIONS = 12
# Bisections of the largest part of a branch: it is then within 1/1024 of the best.
_BISECTIONS = 10
# A family may be in chains of up to so many micro-batches: the prefix, and one row of second pieces
# or more.
_FAMILY_ROWS = (2, 4, 8)
# A family is cut if that saves at least this part of its tokens, 1/8.
_LEAST_SAVED = 8


_Saving = tuple[int, list[tuple[int, int, int]]]
"""Positions that families save; of each, the indices of its first item and after its last one, and
the positions that these share."""


@dataclass(frozen=True)
class Families:
    """The items that have a beginning in common with another one, in depth-first order."""

    items: Ints
    """int64 [f]: items by the first of their samples in that order."""
    link: Ints
    """int64 [f]: positions that each item's first sample shares with that of the item before it; 0
    for the first item of a family. For items of several samples this may be less than all that
    both share, never more."""

    @classmethod
    def find(cls, items: Items) -> Families:
        """The families of a step."""
        table = items.step.prefixes
        assert table is not None
        place = table.place[items.samples]
        nowhere = table.order.size
        first = np.minimum.reduceat(np.where(place < 0, nowhere, place), items.first_samples)
        order = np.argsort(first, kind="stable")
        order = order[first[order] < nowhere]
        link = np.zeros(order.size, dtype=np.int64)
        link[1:] = table.between(first[order[:-1]], first[order[1:]])
        shares = (link > 0) | (np.append(link[1:], 0) > 0)
        return cls(order[shares], link[shares])

    def worth_a_row(self) -> list[tuple[Ints, int]]:
        """Families within these, and the positions that each shares: those of which one row with
        the prefix saves most. The items of each are in depth-first order.

        A prefix of `depth` positions that k items have saves (k - 1) * depth of them.
        """
        found: list[_Saving] = []
        # Of each prefix that has not ended: its positions, its first item, and what those that
        # continue it save.
        prefixes: list[tuple[int, int, _Saving]] = []
        for k, here in enumerate([*self.link.tolist(), 0]):
            first = k - 1
            best: _Saving = (0, [])
            while prefixes and prefixes[-1][0] > here:
                depth, first, inside = prefixes.pop()
                best = (inside[0] + best[0], inside[1] + best[1])
                if (k - 1 - first) * depth >= best[0]:
                    best = ((k - 1 - first) * depth, [(first, k, depth)])
            if here == 0:
                found.append(best)
            elif prefixes and prefixes[-1][0] == here:
                depth, first, inside = prefixes.pop()
                prefixes.append((depth, first, (inside[0] + best[0], inside[1] + best[1])))
            else:
                prefixes.append((here, first, best))
        return [(self.items[first:last], depth) for _, best in found for first, last, depth in best]


def parts_of_families(items: Items, families: Families) -> Iterator[Items]:
    """Items that are parts of families, each time finer than before.

    There is an item for every micro-batch. The last may be `items` itself, unless these share
    nothing inside.
    """
    before = 0
    coarsest = cut_families(items, families, np.inf)
    fewest, has_pipeline = fewest_counts(coarsest), items.step.layout.pp > 1
    multiples = _MULTIPLES if has_pipeline else _MULTIPLES[:1]
    cuts = [_cut_into(items, families, coarsest, int(m * fewest)) for m in multiples]
    # Cumulative, because sums by vector instructions may differ between machines.
    mean = float(np.cumsum(items.work)[-1]) / fewest_counts(items)
    cuts += [cut_families(items, families, f * mean) for f in _FRACTIONS if has_pipeline]
    for parts in sorted(cuts, key=lambda cut: cut.num_items):
        enough = parts.num_items >= fewest_counts(parts)
        if before < parts.num_items < items.num_items and enough:
            before = parts.num_items
            yield parts
    if items.shared.any():
        yield items


def _cut_into(items: Items, families: Families, coarsest: Items, num_parts: int) -> Items:
    """The cut by the largest limit on a part's work that gives at least so many items.

    So the largest families are cut. With fewer items in all, it is the finest cut.
    """
    if coarsest.num_items >= num_parts:
        return coarsest
    low = 0.0
    high = float(coarsest.work.max())
    num_alone = items.num_items - families.items.size
    for _ in range(_LIMIT_BISECTIONS):
        middle = (low + high) / 2
        if num_alone + int(_part_starts(items, families, middle).sum()) >= num_parts:
            low = middle
        else:
            high = middle
    return cut_families(items, families, low)


def cut_families(items: Items, families: Families, most_work: float) -> Items:
    """Parts of the families, and all items without a family.

    A family that fits is one part. Else the branches that continue its first one are cut in the
    same way, and neighbours that fit together stay together: as few parts as needed, the largest
    as small as possible.

    Args:
        most_work: limit on a part's work, as `Items.work` counts it. The budget is another limit,
            and the samples of a micro-batch of a count-based plan. An item over a limit is a part
            by itself.
    """
    members = families.items
    starts = np.flatnonzero(_part_starts(items, families, most_work))
    part_of = np.arange(items.num_items)
    # A part has the number of its first item, so that parts are in the order of the input.
    firsts = np.minimum.reduceat(members, starts) if members.size else members
    part_of[members] = np.repeat(firsts, np.diff(starts, append=members.size))
    _, part_of = np.unique(part_of, return_inverse=True)
    return items.merged(part_of.astype(np.int64))


def _part_starts(items: Items, families: Families, most_work: float) -> Bools:
    """Where the parts of `cut_families` start: bool [f]."""
    step = items.step
    members = families.items
    limits = _Limits(
        step.capacity,
        UNLIMITED if step.max_samples is None else step.max_samples,
        most_work,
        float(step.cost.per_token),
        float(step.cost.per_token_sq),
    )
    units = _units(items.aligned[members], items.item_samples[members], items.work[members])
    starts: Bools = _cut(units, families.link, limits)
    return starts


class _Limits(NamedTuple):
    """Limits of a part, and what a shared position counts in its work."""

    tokens: int
    samples: int
    work: float
    per_token: float
    per_token_sq: float


class _Units(NamedTuple):
    """What continues a branch: items, and smaller branches that fit. Arrays are [units]."""

    start: Ints
    """The first item."""
    tokens: Ints
    samples: Ints
    work: Floats
    is_cut: Bools
    """Branches that are in parts already."""


def _units(tokens: Ints, samples: Ints, work: Floats) -> _Units:
    """Items as units."""
    is_cut = np.zeros(tokens.size, dtype=np.bool_)
    return _Units(np.arange(tokens.size), tokens, samples, work, is_cut)


@kernel
def _cut(items: _Units, link: Ints, limits: _Limits) -> Bools:
    """Where parts start: bool [f].

    Branches are visited in the order in which they end. A branch that fits becomes one unit of the
    branch above it. Else its units are grouped into parts, and what is left of it fits nothing.

    Args:
        items: of the families.
        link: int64 [f], see `Families`.
    """
    size = link.size
    starts = np.zeros(size, dtype=np.bool_)
    # The units of branches that have not ended, and of each of these its depth and first unit.
    units = _Units(
        np.empty(size + 1, dtype=np.int64),
        np.empty(size + 1, dtype=np.int64),
        np.empty(size + 1, dtype=np.int64),
        np.empty(size + 1),
        np.zeros(size + 1, dtype=np.bool_),
    )
    num_units = 0
    open_depth = np.empty(size + 1, dtype=np.int64)
    open_unit = np.empty(size + 1, dtype=np.int64)
    num_open = 0
    for k in range(size + 1):
        here = link[k] if k < size else 0
        # 1. Branches that end before this item.
        while num_open > 0 and open_depth[num_open - 1] > here:
            num_open -= 1
            _close(starts, units, open_unit[num_open], num_units, open_depth[num_open], limits)
            num_units = open_unit[num_open] + 1
        # 2. The branch that it continues, which may begin here.
        if here == 0:
            if num_units > 0:
                starts[units.start[0]] = True
            num_units = 0
        elif num_open == 0 or open_depth[num_open - 1] < here:
            open_depth[num_open] = here
            open_unit[num_open] = num_units - 1
            num_open += 1
        # 3. The item itself.
        if k < size:
            units.start[num_units] = k
            units.tokens[num_units] = items.tokens[k]
            units.samples[num_units] = items.samples[k]
            units.work[num_units] = items.work[k]
            units.is_cut[num_units] = False
            num_units += 1
    return starts


@inner
def _close(
    starts: Bools, units: _Units, first: int, last: int, depth: int, limits: _Limits
) -> None:
    """Make one unit, in place of the first, of the units of a branch of so many positions; mark
    where its parts start if it does not fit."""
    saved = limits.per_token * depth + limits.per_token_sq * depth * depth
    tokens, samples, work = depth, 0, saved
    is_cut = False
    for u in range(first, last):
        tokens += units.tokens[u] - depth
        samples += units.samples[u]
        work += units.work[u] - saved
        is_cut = is_cut or units.is_cut[u]
    if is_cut or tokens > limits.tokens or samples > limits.samples or work > limits.work:
        # Runs of units between those that are cut already.
        begin = first
        for u in range(first, last + 1):
            if u == last or units.is_cut[u]:
                if u > begin:
                    group_units(starts, units, begin, u, depth, limits)
                begin = u + 1
        is_cut = True
    units.tokens[first] = tokens
    units.samples[first] = samples
    units.work[first] = work
    units.is_cut[first] = is_cut


@kernel
def group_units(
    starts: Bools, units: _Units, first: int, last: int, depth: int, limits: _Limits
) -> None:
    """Group neighbouring units of one branch: as few parts as needed, the largest one small."""
    fewest = _num_groups(starts, units, first, last, depth, limits, limits.work, False)
    high = 0.0
    for u in range(first, last):
        high += units.work[u]
    high = min(high, limits.work)
    low = 0.0
    for _ in range(_BISECTIONS if fewest < last - first else 0):
        middle = (low + high) / 2
        if _num_groups(starts, units, first, last, depth, limits, middle, False) <= fewest:
            high = middle
        else:
            low = middle
    _num_groups(starts, units, first, last, depth, limits, high, True)


@inner
def _num_groups(
    starts: Bools,
    units: _Units,
    first: int,
    last: int,
    depth: int,
    limits: _Limits,
    most_work: float,
    marks: bool,
) -> int:
    """Number of groups if each takes units as long as they fit.

    Args:
        marks: mark their starts.
    """
    saved = limits.per_token * depth + limits.per_token_sq * depth * depth
    groups, tokens, samples, work = 0, 0, 0, 0.0
    for u in range(first, last):
        tokens += units.tokens[u] - depth
        samples += units.samples[u]
        work += units.work[u] - saved
        if groups == 0 or tokens > limits.tokens or samples > limits.samples or work > most_work:
            groups += 1
            tokens, samples, work = units.tokens[u], units.samples[u], units.work[u]
            if marks:
                starts[units.start[u]] = True
    return groups


def families_in_pieces(items: Items) -> Iterator[Items]:
    """The items with families cut where their common prefix ends, into chains of more and more
    micro-batches; nothing if no family is in several items that hold a long prefix each."""
    if not items.step.cuts_samples or items.step.prefixes is None:
        return
    families = [family for family in Families.find(items).worth_a_row() if _saves(items, *family)]
    before = 0
    for rows in _FAMILY_ROWS:
        chains = [chain for family in families for chain in _family_chains(items, *family, rows)]
        size = sum(len(chain.rows) for chain in chains)
        if size not in (0, before):
            yield _with_chains(items, chains)
        before = size


class _FamilyChain(NamedTuple):
    """A family in pieces."""

    members: Ints
    """Its items."""
    depth: int
    """Where its samples are cut."""
    rows: list[Ints]
    """The samples of each item: all of them, and then those of each row of second pieces."""


def _saves(items: Items, members: Ints, depth: int) -> bool:
    """Whether items hold so long a prefix that a row for it alone may pay, which holds it; and
    whether all samples have it."""
    table = items.step.prefixes
    assert table is not None
    samples = items.take(members).samples
    place = np.sort(table.place[samples])
    if not items.step.least_piece <= depth <= items.step.capacity or place[0] < 0:
        return False
    if int(table.between(place[:-1], place[1:]).min(initial=depth)) < depth:
        return False
    tokens = int(items.aligned[members].sum())
    return (members.size - 1) * depth * _LEAST_SAVED >= tokens


def _family_chains(items: Items, members: Ints, depth: int, rows: int) -> Iterator[_FamilyChain]:
    """The family as chains of at most so many rows, of about equal numbers of items."""
    room = _room_of_pieces(items, members, depth, rows)

    def chain(own: Ints) -> _FamilyChain:
        samples = items.take(own).samples
        return _FamilyChain(own, depth, [samples, *_rows_of_pieces(items, samples, depth, room)])

    lengths = items.step.lengths[items.take(members).samples]
    own_tokens = items.step.layout.aligned_sample_tokens(lengths) - depth
    # A sample that ends where the family is cut has no second piece.
    if int(own_tokens.max()) > room or int(own_tokens.min()) < 1:
        return
    num_chains = -(-int(own_tokens.sum()) // ((rows - 1) * room))
    while True:
        chains = [chain(own) for own in np.array_split(members, num_chains)]
        if max(len(made.rows) for made in chains) <= rows or num_chains >= members.size // 2:
            break
        num_chains += 1
    # Two items at least share the row of the prefix.
    yield from (made for made in chains if len(made.rows) <= rows and made.members.size > 1)


def _room_of_pieces(items: Items, members: Ints, depth: int, rows: int) -> int:
    """Tokens of second pieces that a row may hold.

    In Megatron's order a stage holds `window` rows, and a chain of R of them makes R - 1 more. One
    of R is a prefix, and all of them together have no more tokens than whole rows of the family.
    """
    step = items.step
    if step.forward_only:
        return step.capacity
    window = step.layout.chunks_in_flight()
    whole = np.minimum(items.aligned[members], step.capacity)
    live = step.max_live or window * (int(whole.sum()) // whole.size)
    prefixes = -(-(window + rows - 1) // rows)
    return min(step.capacity, (live - prefixes * depth) // (window + rows - 1 - prefixes))


def _rows_of_pieces(items: Items, samples: Ints, depth: int, room: int) -> list[Ints]:
    """The samples of each row of second pieces: as few rows as needed, the largest one small."""
    step = items.step
    aligned = step.layout.aligned_sample_tokens(step.lengths[samples])
    cost = step.cost
    work = float(cost.per_token) * (aligned - depth).astype(np.float64)
    work += float(cost.per_token_sq) * (aligned * aligned - depth * depth).astype(np.float64)
    starts = np.zeros(samples.size, dtype=np.bool_)
    units = _units(aligned - depth, np.ones_like(samples), work)
    limits = _Limits(room, UNLIMITED, math.inf, 0.0, 0.0)
    group_units(starts, units, 0, samples.size, 0, limits)
    return np.split(samples, np.flatnonzero(starts)[1:])


def _with_chains(items: Items, chains: Sequence[_FamilyChain]) -> Items:
    """The items with families in pieces, which follow the whole ones."""
    step = items.step
    whole = np.setdiff1d(np.arange(items.num_items), np.concatenate([c.members for c in chains]))
    rows = [row for chain in chains for row in chain.rows]
    sizes = [len(chain.rows) for chain in chains]
    num = np.array([row.size for row in rows])
    samples = np.concatenate(rows)
    item_of = np.repeat(np.arange(num.size), num)
    depth = np.repeat([chain.depth for chain in chains], sizes)
    is_first = np.diff(np.repeat(np.arange(len(chains)), sizes), prepend=-1) > 0
    start = np.where(is_first, 0, depth)
    real = step.lengths[samples]
    aligned = step.layout.aligned_sample_tokens(real)
    real, aligned = (np.where(is_first[item_of], depth[item_of], n) for n in (real, aligned))
    begin = start[item_of]
    none = np.zeros(num.size, dtype=np.int64)
    end = none.copy()
    np.maximum.at(end, item_of, aligned)
    pieces = replace(
        items,
        samples=samples,
        item_samples=num,
        lengths=row_sums(real - begin, item_of, num.size),
        aligned=row_sums(aligned - begin, item_of, num.size),
        aligned_sq=row_sums(aligned * aligned - begin * begin, item_of, num.size),
        shared=none,
        shared_sq=none,
        begin=start,
        end=end,
        chain=np.repeat(np.arange(len(chains)), sizes),
    ).sharing()
    return items.take(whole).joined(pieces)
