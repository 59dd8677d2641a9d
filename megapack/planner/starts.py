"""Where the search starts from: values of M, targets of their rows, and items packed to these.

    M (`counts_to_try`) -> targets [dp, M] -> items into rows -> a simulated board

Each freedom has a function that yields such boards:
`narrow_starts`: whole items in rows on one DP rank each. `wide_starts`: rows over several ranks.
`cut_start`: pieces of samples in chains, and whole items around them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from megapack.base.arrays import Floats, Ints
from megapack.planner.bins import pack_to_targets
from megapack.planner.board import fill_rows, put_pieces
from megapack.planner.counts import split_heaviest
from megapack.planner.cuts import CutItems, cut_items
from megapack.planner.draft import Draft
from megapack.planner.fill import fill_board, fill_rule
from megapack.planner.scored import Scored, Way
from megapack.planner.step import UNLIMITED, spread_counts
from megapack.planner.targets import Target, equal_target, ramp_targets, snake

# All constants of this module were chosen by hand. docs/maintainers/planner.md says how to judge a
# change.

# Values of M are tried up to twice the closed form for equal micro-batches, and up to 6 times the
# least. A step of few samples needs 40 at times, as long samples fill several cells.
_MAX_GROWTH = 6
_MANY_POSITIONS = 40
# Without a pipeline more positions only make room to arrange wide rows: up to 12 more than the
# fewest.
_EXTRA_POSITIONS = 12
# Limit on rounds of the profile search, which may spend a quarter of the evaluations. A round costs
# up to 2 evaluations for each of about 2 * pp levels.
MAX_ROUNDS = 4
_PROFILE_PART = 4
# Targets that samples are packed to, best first.
_MAX_PACKED = 4
# Of up to 16 items per rank a packed row is far from its target, so each M is packed: 24 samples of
# about one length on dp2 pp4 take 0.86 of the time.
_FEW_ITEMS = 16
# A whole item may take this many times its position's target before it goes over more ranks.
_STRETCH = 1.15
# Work grows by about this part, for the items that are cut over ranks.
_OVERHEAD = 1.02


def counts_to_try(way: Way, least: int, most: int) -> list[int]:
    """Legal values of M from the least to where more cannot be faster, smaller ones closer
    together.

    The fastest M for equal micro-batches is sqrt(work * (pp - 1) / (vpp * fixed)). On pp=4 and
    vpp=1, 0.3 s of a rank's work in a chunk and 1 ms of fixed cost give sqrt(0.3 * 3 / 0.001) = 30.

    Args:
        least, most: limits on M.
    """
    step, layout = way.step, way.layout
    best = top = max(_MAX_GROWTH * least, _MANY_POSITIONS)
    if way.cost.fixed > 0:
        equal = way.rank_work * (layout.pp - 1) / (layout.vpp * way.cost.fixed)
        best = round(min(math.sqrt(equal), top))
    if step.policy.search == 0:
        wanted = [max(least, min(best, 2 * least)), least]
    elif layout.pp > 1:
        wanted = spread_counts(least, max(min(2 * best, top), least + layout.group_size))
    elif way.num_levels > 1:
        wanted = spread_counts(least, least + _EXTRA_POSITIONS)
    else:
        # No bubble is counted, so more micro-batches gain little: from 16 on 16, 17 and 19.
        wanted = [least, least + 1, least + 2 + least // 16]
    legal = (step.legal_count(count) for count in wanted)
    return [count for count in dict.fromkeys(legal) if count <= most]


def narrow_starts(way: Way, evaluations: int) -> Iterator[tuple[Scored, int]]:
    """Boards of rows on one rank each, at least one, and the evaluations that each has cost."""
    step, items = way.step, way.items
    least = step.least_count(items.fewest_rows[1])
    spent = 0
    is_packed = False
    if step.max_samples is None:
        # With more micro-batches a row would be empty.
        most = items.num_items // way.layout.dp
        counts = counts_to_try(way, least, most)
        per_round = 2 * max(1, len(counts)) * 2 * way.layout.pp
        rounds = min(MAX_ROUNDS, evaluations // (_PROFILE_PART * per_round))
        rounds = max(1, rounds) if evaluations else 0
        equal = [equal_target(way, count, rounds) for count in counts]
        equal.sort(key=lambda target: target.seconds)
        spent = sum(target.profile.evaluations for target in equal)
        kinds = [(equal, _MAX_PACKED)]
        if rounds and way.layout.pp > 1 and items.num_items <= _FEW_ITEMS * way.layout.dp:
            legal = {step.legal_count(count) for count in range(least, most + 1)}
            others = sorted(count for count in legal - {*counts} if count <= most)
            kinds.append(([equal_target(way, count, 0) for count in others], len(others)))
        for targets, limit in kinds:
            boards = (packed(way, target.rows(way)) for target in targets)
            # Under a cap on live tokens few boards are legal.
            first = limit if step.max_live is None else None
            for scored in islice((own for own in boards if own is not None), first):
                is_packed = True
                yield scored, spent + way.layout.dp
                spent = 0
    is_uniform = step.policy.row_shape == "uniform"
    if not is_packed or step.lockstep or is_uniform or step.max_live is not None:
        # As few rows as hold the items, split until they fill the smallest legal M.
        wanted = way.layout.dp * least
        row_of, _ = split_heaviest(*items.fewest_rows, wanted, items.work)
        yield _in_rounds(way, row_of, np.ones((way.layout.dp, least))), spent + way.layout.dp
        if step.max_live is not None:
            # The largest rows as far apart as the rows that a stage holds at once.
            turn = np.arange(least) % way.layout.chunks_in_flight()
            apart = np.tile(-turn.astype(np.float64), (way.layout.dp, 1))
            yield _in_rounds(way, row_of, apart), way.layout.dp


def packed(way: Way, targets: Floats) -> Scored | None:
    """Items in rows that are filled to targets; None if they do not fit."""
    if way.step.policy.row_shape == "uniform":
        targets = np.full_like(targets, way.rank_work / targets.shape[1])
    items = way.items
    if np.ptp(items.kind):
        pure, num_rows = split_heaviest(*items.fewest_rows, targets.size, way.work)
        return _in_rounds(way, pure, targets) if num_rows <= targets.size else None
    row_of = pack_to_targets(
        items.room, way.work, targets.ravel(), way.step.capacity, order=way.order
    )
    if row_of is None:
        return None
    if way.step.lockstep or way.step.policy.row_shape == "uniform":
        return _in_rounds(way, row_of, targets)
    dp, count = targets.shape
    work = np.bincount(row_of, weights=way.work, minlength=dp * count).reshape(dp, count)
    by_rank = np.argsort(-work, axis=1, kind="stable") + np.arange(dp)[:, None] * count
    return _in_order(way, row_of, by_rank, targets)


def _in_rounds(way: Way, row_of: Ints, targets: Floats) -> Scored:
    """Rows over ranks, sorted by work: each rank gets one of every dp rows, so that the k-th rows
    of all ranks have similar work, and the sums of ranks are about equal."""
    dp, count = targets.shape
    work = np.bincount(row_of, weights=way.work, minlength=dp * count)
    rank_of = snake(dp * count, dp)
    by_rank = np.argsort(-work, kind="stable")[np.argsort(rank_of, kind="stable")]
    return _in_order(way, row_of, by_rank.reshape(dp, count), targets)


def _in_order(way: Way, row_of: Ints, by_rank: Ints, targets: Floats) -> Scored:
    board = way.blank(targets.shape[1])
    board.rows[:] = order_by_target(by_rank, targets)
    fill_rows(board, row_of)
    return way.score(board)


def order_by_target(rows: Ints, targets: Floats) -> Ints:
    """Ranks' rows in pipeline order: the heaviest row where the target is largest.

    Equal targets are filled from the middle outwards, so that the lightest rows are first and last.
    Rows 10, 11, 12, 13 with targets 1, 3, 2, 0.5 give 12, 10, 11, 13.

    Args:
        rows: int64 [dp, M], heaviest first.
        targets: float64 [dp, M].
    """
    count = targets.shape[1]
    position = np.arange(count)
    from_end = np.broadcast_to(np.minimum(position, count - 1 - position), targets.shape)
    # Stable, so that of equal targets as far from the ends the first comes first.
    order = np.lexsort((-from_end, -targets))
    out = np.empty_like(rows)
    np.put_along_axis(out, order, rows, axis=-1)
    return out


def wide_starts(way: Way, targets: list[Target], fastest: float) -> Iterator[Scored]:
    """Boards of rows over several ranks, those of the fastest targets first.

    A target is left out if even divisible work would take longer than the fastest board.

    Args:
        fastest: seconds of the fastest board that is known.
    """
    for target in targets:
        if fastest <= target.seconds < math.inf:
            break
        scored = filled(way, target.rows(way) * _OVERHEAD)
        if scored is not None and scored.seconds < math.inf:
            fastest = min(fastest, scored.seconds)
            yield scored
    count = max(target.count for target in targets)
    most = way.step.legal_count(way.items.num_items)
    while fastest == math.inf and count < way.items.num_items:
        # As many positions as items have room for all of them.
        count = min(way.step.legal_count(2 * count), most)
        scored = filled(way, equal_target(way, count, 0).rows(way) * _OVERHEAD)
        if scored is not None:
            fastest = scored.seconds
            yield scored


def loosened(way: Way, draft: Draft) -> Scored:
    """A draft as a board whose items may choose other rows, over several ranks."""
    way = replace(way, items=draft.items)
    count = draft.num_microbatches
    equal = np.full((way.layout.dp, count), way.rank_work / count + way.cost.fixed)
    return way.score_draft(draft, fill_rule(way.items, way.row_cost, way.work, equal))


def filled(way: Way, targets: Floats, stretch: float = _STRETCH) -> Scored | None:
    """Items in rows over one rank or several; None if they find no room.

    Args:
        stretch: see `fill_board`.
    """
    rule = fill_rule(way.items, way.row_cost, way.work, targets + way.cost.fixed)
    board = way.blank(targets.shape[1])
    if rule is None or not fill_board(board, rule, stretch):
        return None
    return way.score(board, rule)


@dataclass(frozen=True)
class Choice:
    """How samples are cut, and where their pieces lie."""

    count: int
    """M."""
    stretch: float | None
    """The longest piece in mean rows; None: only samples that fit into no row are cut."""
    place: float = 0.0
    """Of chains in a rank's order, from 0 to 1."""
    share: float = math.inf
    """The most work of a chain on a rank, in mean ranks: a longer chain lies over several."""
    is_wide: bool = False
    """Whether rows may lie over several ranks."""


def cut_for(way: Way, choice: Choice) -> CutItems | None:
    """The items with samples cut as a choice says."""
    step, layout = way.step, way.layout
    longest = (choice.stretch or 0.0) * way.rank_work / choice.count
    if step.forward_only or layout.pp == 1:
        # No stage waits for a backward, so only samples over the budget are cut.
        longest = 0.0
    room = step.capacity if step.cuts_samples else UNLIMITED
    if choice.stretch is None and choice.is_wide:
        room = int(way.row_cost.alone[-1])
    most = choice.count if layout.vpp == 1 else min(layout.group_size, choice.count)
    share = choice.share * way.rank_work
    return cut_items(way, longest, most, room, share, 1 << (way.num_levels - 1))


def cut_start(way: Way, cut: CutItems, choice: Choice) -> Scored | None:
    """Pieces in chains at one place of each rank's order, and whole items around them; None if some
    find no room.

    Args:
        way: of the items that are cut.
    """
    count = choice.count
    cells = cut.cells(count, choice.place)
    if cells is None:
        return None
    board = way.blank(count)
    levels = np.repeat(np.frexp(cut.widths)[1] - 1, cut.sizes)
    put_pieces(board, cut.num_whole, cells, levels)
    has_piece = board.piece_of[board.rows] >= 0
    held = np.where(has_piece, board.row_seconds[board.rows] - way.row_cost.fixed[0], 0.0)
    targets = ramp_targets(way, held) + way.cost.fixed
    # All rows of a chain are live at once: those of a sample over the budget get nothing else.
    chain = board.chain[board.piece_of[board.rows]]
    longest = np.zeros(cut.sizes.size, dtype=np.int64)
    np.maximum.at(longest, cut.items.chain[cut.num_whole :], cut.items.end[cut.num_whole :])
    targets[has_piece & (np.append(longest, 0)[chain] > way.step.capacity)] = 0.0
    rule = fill_rule(way.items, way.row_cost, way.work, targets)
    if rule is None:
        return None
    rule = rule._replace(order=rule.order[rule.order < cut.num_whole])
    if not fill_board(board, rule, _STRETCH):
        return None
    if way.step.prefixes is not None:
        board = way.board_of(way.draft_of(board))
    return way.score(board, rule if choice.is_wide else None)
