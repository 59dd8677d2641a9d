"""Search by simulated annealing on a board whose DP ranks share rows.

A move takes a random operation on the critical path, the chain of operations that the step's end
waits for. It moves or exchanges items of its row, exchanges blocks of cells, or takes all items out
of a few blocks and lets them choose again. The result is simulated with all ranks together, because
ranks that share a row wait for each other. A slightly slower step is accepted, less and less, and
the fastest one is kept.
"""

from __future__ import annotations

import numpy as np

from megapack.base.arrays import Floats, Ints
from megapack.base.jit import kernel
from megapack.base.loops import largest
from megapack.planner.board import (
    Board,
    block_width,
    clear_row,
    copy_board,
    exchange,
    swap_blocks,
)
from megapack.planner.clock import Clock, score_shared
from megapack.planner.fill import RANDOM_PARTS, FillRule, fill_board
from megapack.planner.moves import SEED, next_random, pick
from megapack.planner.own_orders import OwnOrders

# All constants of this module were chosen by hand. docs/planner.md measures the whole search.

# Of 8 kinds of moves, 0 and 1 exchange blocks, 2 to 4 exchange items, and the others let the items
# of some blocks choose again.
_KINDS = 8
_LAST_SWAP = 1
_LAST_EXCHANGE = 4
# Pairs of rows that are drawn for an exchange of items until one is legal.
_DRAWS = 8
# Items choose again from 1 to 3 blocks of at most 2**3 ranks, and no block is added after 64 items.
_MAX_RUINED = 3
_MAX_RUINED_LEVELS = 4
_MAX_TAKEN = 64
# Items choose again with a stretch from 0.9 to 1.5 and up to 0.3 mean targets of noise.
_LEAST_STRETCH = 0.9
_STRETCH_RANGE = 0.6
_NOISE = 0.3
# A step that is 0.3 % slower is accepted at first, and none at the end.
_WARMTH = 0.003
# The mean of the ranks' seconds counts as this part of the step's: a move that makes only a faster
# rank faster is kept, and helps later.
_TIE = 0.02


@kernel
def anneal(
    board: Board,
    kept: Board,
    best_board: Board,
    clock: Clock,
    own: OwnOrders | None,
    orders: Ints,
    rule: FillRule,
    budget: int,
    goal: float,
) -> float:
    """Change a board by random moves and leave the fastest one found; returns its seconds.

    Pieces of samples stay where they are.

    Args:
        kept, best_board: clones of the board, written.
        orders: `own.ops`, or Megatron's one order in the same columns.
        budget: simulations to spend.
        goal: seconds that are fast enough.
    """
    random = np.array([SEED])
    place = np.empty(board.row_of.size, dtype=np.int64)
    for k in range(rule.order.size):
        place[rule.order[k]] = k
    size = orders.shape[1]
    end = np.empty((size, 1 if clock.lockstep else board.rows.shape[0]))
    best = score_shared(board, clock, own, end)
    current = best + _tie(board, end.shape[1])
    path = np.empty((size, 2), dtype=np.int64)
    length = _critical_path(board, clock, orders, end, path)
    for used in range(budget):
        if best <= goal:
            break
        at = next_random(random, length)
        rank = path[at, 0]
        position = path[at, 1]
        kind = next_random(random, _KINDS)
        if kind <= _LAST_SWAP:
            done = _try_swap(board, random, rank, position)
        elif kind <= _LAST_EXCHANGE:
            done = _try_exchange(board, random, rank, position)
        else:
            done = _try_ruin(board, rule, random, rank, position, place)
        if not done:
            copy_board(kept, board)
            continue
        seconds = score_shared(board, clock, own, end)
        value = seconds + _tie(board, end.shape[1])
        warmth = _WARMTH * (budget - used) / budget
        if value < current * (1 + warmth):
            current = value
            copy_board(board, kept)
            length = _critical_path(board, clock, orders, end, path)
            if seconds < best:
                best = seconds
                copy_board(board, best_board)
        else:
            copy_board(kept, board)
    copy_board(best_board, board)
    return float(best)


@kernel
def _tie(board: Board, ranks: int) -> float:
    """A small part of the mean of the ranks' seconds, so that moves on faster ranks count, too."""
    total = 0.0
    for rank in range(ranks):
        total += board.seconds[rank]
    return float(_TIE * total / ranks)


@kernel
def _critical_path(board: Board, clock: Clock, orders: Ints, end: Floats, path: Ints) -> int:
    """First rank and position of the micro-batches of the operations that the step's end waits
    for, written to `path`.

    Returns:
        Their number.
    """
    size, ranks = end.shape
    worst = largest(board.seconds[:ranks])
    rank = 0
    op = 0
    for r in range(ranks):
        # All ranks of a block have the seconds of its slowest one.
        for o in range(size if board.seconds[r] == worst else 0):
            if end[o, r] > end[op, rank]:
                rank = r
                op = o
    ops = orders[_order_of(board, clock, orders.shape[0], rank)]
    before = _before(ops, clock.ops.pp)
    length = 0
    while op >= 0:
        position = ops[op, 1]
        low = rank
        high = rank + 1
        owner = rank
        if clock.lockstep:
            for r in range(board.rows.shape[0]):
                row, slow = board.rows[r, position], board.rows[owner, position]
                if board.row_seconds[row] > board.row_seconds[slow]:
                    owner = r
        else:
            width = 1 << board.level[board.rows[rank, position]]
            low = rank - rank % width
            high = low + width
        path[length, 0] = owner
        path[length, 1] = position
        length += 1
        source = ops[op, 4]
        latest = -1.0
        following = -1
        for r in range(low, high):
            if before[op] >= 0 and end[before[op], r] > latest:
                latest = end[before[op], r]
                following = before[op]
                rank = r
            if source < size and end[source, r] + clock.ops.p2p > latest:
                latest = end[source, r] + clock.ops.p2p
                following = source
                rank = r
        op = following
    return length


@kernel
def _order_of(board: Board, clock: Clock, num_orders: int, rank: int) -> int:
    """Index of the order that a rank runs, see `OwnOrders.ops`."""
    if num_orders == 1 or clock.lockstep:
        return 0
    return num_orders - 1 if block_width(board, rank) > 1 else rank


@kernel
def _before(ops: Ints, pp: int) -> Ints:
    """The operation before each one on its stage; -1: none."""
    before = np.empty(ops.shape[0], dtype=np.int64)
    last = np.full(pp, -1, dtype=np.int64)
    for op in range(ops.shape[0]):
        before[op] = last[ops[op, 0]]
        last[ops[op, 0]] = op
    return before


@kernel
def _try_swap(board: Board, random: Ints, rank: int, position: int) -> bool:
    """Exchange a block at a position with a block at another one, or two whole positions."""
    dp, count = board.rows.shape
    other_position = next_random(random, count)
    kind = next_random(random, 3)
    if kind == 0:
        if other_position == position:
            return False
        if not _may_leave(board, 0, position, dp) or not _may_leave(board, 0, other_position, dp):
            return False
        swap_blocks(board, 0, position, 0, other_position, dp)
        return True
    width = 1 << board.level[board.rows[rank, position]]
    if next_random(random, 3) == 0 and 2 * width <= dp:
        width *= 2
    rank -= rank % width
    if rank + width > dp:
        return False
    other = rank if kind == 1 else next_random(random, dp // width) * width
    if other == rank and other_position == position:
        return False
    if not _may_leave(board, rank, position, width):
        return False
    if not _may_leave(board, other, other_position, width):
        return False
    swap_blocks(board, rank, position, other, other_position, width)
    return True


@kernel
def _may_leave(board: Board, rank: int, position: int, width: int) -> bool:
    """Whether no row reaches out of a block, and none has a piece."""
    for r in range(rank, rank + width):
        row = board.rows[r, position]
        # A row that is no wider than the block lies within it, as both are aligned.
        if (1 << board.level[row]) > width or board.piece_of[row] >= 0:
            return False
    return True


@kernel
def _try_exchange(board: Board, random: Ints, rank: int, position: int) -> bool:
    """Move an item of a row to another row, or exchange two items."""
    dp, count = board.rows.shape
    row = board.rows[rank, position]
    if board.num_items[row] == 0:
        return False
    for _ in range(_DRAWS):
        other_position = next_random(random, count)
        other = board.rows[next_random(random, dp), other_position]
        if other == row:
            continue
        a = pick(board, random, row)
        b = -1
        if board.num_items[other] > 0 and next_random(random, 3) > 0:
            b = pick(board, random, other)
        if board.chain[a] >= 0 or (b >= 0 and board.chain[b] >= 0):
            continue
        k = board.level[row]
        j = board.level[other]
        if b < 0 and board.num_items[row] == 1 and k > 0:
            continue
        if b >= 0 and (board.num_items[row] == 1 and board.num_items[other] == 1 and j == k):
            continue
        if not _has_room(board, row, k, a, b) or not _has_room(board, other, j, b, a):
            continue
        exchange(board, a, b, row, other)
        return True
    return False


@kernel
def _has_room(board: Board, row: int, level: int, leaving: int, coming: int) -> bool:
    """Whether a row stays within its capacity after one item leaves and another one comes; -1: no
    item."""
    tokens = board.tokens[row]
    if leaving >= 0:
        tokens -= board.item_tokens[level, leaving]
    if coming >= 0:
        tokens += board.item_tokens[level, coming]
    return bool(tokens <= board.cost.capacity[level])


@kernel
def _try_ruin(
    board: Board, rule: FillRule, random: Ints, rank: int, position: int, place: Ints
) -> bool:
    """Take all items out of a few blocks, and let them choose their rows again.

    Args:
        place: int64 [I], where each item is in the rule's order.
    """
    dp, count = board.rows.shape
    taken = np.empty(board.row_of.size, dtype=np.int64)
    size = 0
    for _ in range(1 + next_random(random, _MAX_RUINED)):
        width = 1 << next_random(random, min(board.cost.unit.size, _MAX_RUINED_LEVELS))
        low = rank - rank % width
        for r in range(low, min(low + width, dp)):
            size = clear_row(board, r, position, taken, size)
        if size >= _MAX_TAKEN:
            break
        rank = next_random(random, dp)
        position = next_random(random, count)
    if size == 0:
        return False
    chosen = taken[:size]
    chosen = chosen[np.argsort(place[chosen], kind="mergesort")]
    stretch = _LEAST_STRETCH + _STRETCH_RANGE * next_random(random, RANDOM_PARTS) / RANDOM_PARTS
    noise = _NOISE * next_random(random, RANDOM_PARTS) / RANDOM_PARTS
    return fill_board(board, rule, chosen, stretch, random, noise)
