"""Improve a board by random moves, as many as a budget of simulations allows.

    draw a move where the step is slow -> change the board -> simulate -> keep it, or take it back

A move exchanges items of two rows, exchanges rows, or takes all items out of a few rows and lets
them choose again (a ruin). Which of them are drawn depends on what the board may have:

- Rows on one rank each: the ranks that a move changes are simulated, and it is kept if both are
  then faster than the slowest rank was.
- Rows over several ranks: these wait for each other, so all ranks are simulated. A slightly slower
  step is kept, less and less so, and the fastest board is left: simulated annealing.

Moves come from a fixed pseudo-random sequence and the budget counts simulations, so equal inputs
give equal plans. Pieces stay in their rows, and these in their places.
"""

from __future__ import annotations

import numpy as np

from megapack.base.arrays import Ints
from megapack.base.jit import inner, kernel
from megapack.planner.board import (
    RANDOM_PARTS,
    Board,
    chain_at,
    clear_row,
    copy_board,
    exchange,
    fastest,
    fits,
    next_random,
    row_seconds,
    slowest,
)
from megapack.planner.clock import Clock, score_rank, score_shared
from megapack.planner.fill import FillRule, fill_board
from megapack.planner.orders import OwnOrders

# All constants of this module were chosen by hand. docs/maintainers/planner.md says how to judge a
# change.

# Start of the pseudo-random sequence.
_SEED = 88172645463325252 & 0xFFFFFFFFFFFF
# Of 8 moves of rows on one rank each, 3 change the order of the slowest rank, 3 exchange items of
# its rows, one exchanges items with a random rank, and one with the fastest.
_KINDS = 8
_FIRST_OWN_ROWS = 3
_FIRST_OTHER_RANK = 6
# Of 8 moves of rows over several ranks, 5 exchange items, and 3 are ruins.
_FIRST_RUIN = 5
# Exchanges with another rank that are drawn per move. The one nearest to the wanted shift is
# simulated: 0.1 s if the slowest rank takes 1.2 s and the other one 1.0 s. 64 draws take a fifth
# longer to plan 2,048 samples and give plans that are no better, by less than 0.1 %.
_DRAWS = 12
# Moves without a legal draw cost no simulation. The search ends after 4 of them per simulation of
# the budget, and 64 more: after 8,256 with a budget of 2,048.
_MISSES_PER_SIMULATION = 4
_FREE_MISSES = 64
# Items choose again from 1 to 3 blocks of at most 2**3 ranks, and no block is added after 64 items;
# with a stretch from 0.9 to 1.5 and targets that are up to 0.3 higher.
_MAX_RUINED = 3
_RUINED_LEVELS = 4
_RUINED_ITEMS = 64
_LEAST_STRETCH = 0.9
_STRETCH_RANGE = 0.6
_NOISE = 0.3
# With rows over several ranks, a step that is 0.3 % slower is kept at first, and none at the end.
_WARMTH = 0.003


@kernel
def improve_ranks(
    board: Board, clock: Clock, own: OwnOrders | None, budget: int, passes: float
) -> None:
    """Improve a scored board of rows on one rank each, in place.

    Args:
        budget: simulations of a rank to spend.
        passes: a rank's seconds over its micro-batches' forward seconds, without the bubble.
    """
    random = np.array([_SEED])
    dp, count = board.rows.shape
    misses_left = _MISSES_PER_SIMULATION * budget + _FREE_MISSES
    while budget > 0 and misses_left > 0:
        # 1. Draw a move of the slowest rank, or in lockstep of any, and another one.
        rank = next_random(random, dp) if clock.lockstep else slowest(board)
        other = rank
        kind = next_random(random, _KINDS)
        is_order = kind < _FIRST_OWN_ROWS and clock.ops.pp > 1
        has_other = kind >= _FIRST_OTHER_RANK or clock.ops.pp == 1 or board.cost.fixed_rows
        if has_other and not is_order:
            other = fastest(board)
            if kind % 2 == 0 or clock.lockstep or other == rank:
                other = next_random(random, dp)
        a, b, row_a, row_b = -1, -1, -1, -1
        p, q = next_random(random, count), next_random(random, count)
        is_drawn = p != q or rank != other
        # 2. Change the board.
        if is_order or board.cost.fixed_rows:
            is_drawn &= chain_at(board, rank, p) < 0 and chain_at(board, other, q) < 0
            if is_drawn:
                _swap_rows(board, rank, p, other, q)
        else:
            wanted = (board.seconds[rank] - board.seconds[other]) / (2 * passes)
            a, b, row_a, row_b = _draw_exchange(board, random, rank, -1, other, wanted)
            is_drawn = a >= 0
            if is_drawn:
                exchange(board, a, b, row_a, row_b)
        if not is_drawn:
            misses_left -= 1
            continue
        # 3. Simulate: both ranks must be faster than the slowest one was.
        seconds = score_rank(board, clock, own, rank)
        other_seconds = seconds
        budget -= 1
        if other != rank and not clock.lockstep and seconds < board.seconds[rank]:
            other_seconds = score_rank(board, clock, own, other)
            budget -= 1
        # 4. Keep the move, or take it back.
        if max(seconds, other_seconds) < board.seconds[rank]:
            board.seconds[rank] = seconds
            board.seconds[other] = other_seconds
            if clock.lockstep:
                for k in range(dp):
                    board.seconds[k] = seconds
        elif a >= 0:
            exchange(board, a, b, row_b, row_a)
        else:
            _swap_rows(board, rank, p, other, q)


@kernel
def improve_blocks(
    board: Board,
    kept: Board,
    best: Board,
    clock: Clock,
    own: OwnOrders | None,
    rule: FillRule,
    budget: int,
    goal: float,
) -> None:
    """Change a scored board of rows over several ranks, and leave the fastest one found.

    Args:
        kept, best: clones of the board, written.
        budget: simulations of the step to spend.
        goal: seconds of the step that are fast enough.
    """
    random = np.array([_SEED])
    dp, count = board.rows.shape
    # Where each item is in the rule's order.
    place = np.empty(board.row_of.size, dtype=np.int64)
    for k in range(rule.order.size):
        place[rule.order[k]] = k
    fewest = current = board.seconds[slowest(board)]
    for used in range(budget):
        if fewest <= goal:
            break
        rank, position = slowest(board), next_random(random, count)
        kind = next_random(random, _KINDS)
        if kind < _FIRST_RUIN:
            other = next_random(random, dp)
            a, b, row_a, row_b = _draw_exchange(board, random, rank, position, other, 0.0)
            done = a >= 0
            if done:
                exchange(board, a, b, row_a, row_b)
        else:
            done = _try_ruin(board, rule, random, rank, position, place)
        if done:
            seconds = score_shared(board, clock, own)
            if seconds < current * (1 + _WARMTH * (budget - used) / budget):
                current = seconds
                copy_board(board, kept)
                if seconds < fewest:
                    fewest = seconds
                    copy_board(board, best)
                continue
        copy_board(kept, board)
    copy_board(best, board)


@inner
def _swap_rows(board: Board, rank: int, position: int, other: int, other_position: int) -> None:
    """Exchange the rows of two cells."""
    row = board.rows[rank, position]
    board.rows[rank, position] = board.rows[other, other_position]
    board.rows[other, other_position] = row


@inner
def _pick(board: Board, random: Ints, row: int) -> int:
    """A random item of a row."""
    item = board.head[row]
    for _ in range(next_random(random, board.num_items[row])):
        item = board.next[item]
    return int(item)


@inner
def _relief(board: Board, row: int, leaving: int, coming: int) -> float:
    """Forward seconds that a row saves if one item leaves and another one comes (-1: no item)."""
    k = board.level[row]
    tokens = board.tokens[row] - board.item_tokens[k, leaving]
    tokens_sq = board.tokens_sq[row] - board.item_tokens_sq[k, leaving]
    num_samples = board.num_samples[row] - board.item_samples[leaving]
    if coming >= 0:
        tokens += board.item_tokens[k, coming]
        tokens_sq += board.item_tokens_sq[k, coming]
        num_samples += board.item_samples[coming]
    after = row_seconds(board.cost, k, tokens, tokens_sq, num_samples)
    return float(board.row_seconds[row] - after)


@inner
def _draw_exchange(
    board: Board, random: Ints, rank: int, position: int, other: int, wanted: float
) -> tuple[int, int, int, int]:
    """Draw an exchange between two ranks that saves the first one about `wanted` seconds; without
    any wanted, as within a rank, the first legal one.

    Args:
        position: of the first rank's row; -1: any.

    Returns:
        Items a and b, the row of a and the row of b. b is -1 if a moves and no item comes back; a
        is -1 if no draw was legal.
    """
    count = board.rows.shape[1]
    best = (-1, -1, -1, -1)
    nearest = np.inf
    for _ in range(_DRAWS):
        row_a = board.rows[rank, position if position >= 0 else next_random(random, count)]
        row_b = board.rows[other, next_random(random, count)]
        if board.num_items[row_a] == 0 or row_a == row_b:
            continue
        a = _pick(board, random, row_a)
        b = -1
        # One draw in three moves an item without an exchange.
        if next_random(random, 3) > 0 and board.num_items[row_b] > 0:
            b = _pick(board, random, row_b)
        if board.chain[a] >= 0 or (b >= 0 and board.chain[b] >= 0):
            continue
        mate = b if b >= 0 else board.head[row_b]
        if mate >= 0 and board.kind[mate] != board.kind[a]:
            continue
        legal = fits(board, row_a, board.level[row_a], a, b)
        if not (legal and fits(board, row_b, board.level[row_b], b, a)):
            continue
        miss = abs(_relief(board, row_a, a, b) - wanted)
        if miss < nearest:
            nearest = miss
            best = (a, b, row_a, row_b)
        if wanted == 0.0:
            break
    return best


@inner
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
        width = 1 << next_random(random, min(board.cost.unit.size, _RUINED_LEVELS))
        low = rank - rank % width
        for r in range(low, min(low + width, dp)):
            size = clear_row(board, r, position, taken, size)
        if size >= _RUINED_ITEMS:
            break
        rank = next_random(random, dp)
        position = next_random(random, count)
    if size == 0:
        return False
    chosen = taken[:size]
    chosen = chosen[np.argsort(place[chosen], kind="mergesort")]
    stretch = _LEAST_STRETCH + _STRETCH_RANGE * next_random(random, RANDOM_PARTS) / RANDOM_PARTS
    # Targets that differ by chance make another choice.
    noise = _NOISE * next_random(random, RANDOM_PARTS) / RANDOM_PARTS
    targets = rule.targets.copy()
    for r in range(dp):
        for k in range(count):
            part = next_random(random, RANDOM_PARTS) / RANDOM_PARTS
            targets[r, k] += noise * part * rule.targets[r, k]
    return fill_board(board, FillRule(chosen, rule.least, targets), stretch)
