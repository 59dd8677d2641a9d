"""Places found in trees are those that a look at every cell finds."""

from __future__ import annotations

import numpy as np
import pytest

from megapack.planner.bins import best_leaf
from megapack.planner.board import Board, RowCost, empty_board, put
from megapack.planner.fill import (
    Goals,
    _left,
    find_places,
    put_into_place,
)

pytestmark = pytest.mark.unit

DP, COUNT, LEVELS = 13, 7, 4


def board_of(tokens: np.ndarray, capacity: int, dp: int = DP, count: int = COUNT) -> Board:
    """A board without items in rows. Rows over several ranks have a coarser alignment."""
    width = 1 << np.arange(LEVELS)
    share = 1.05 / width
    share[0] = 1.0
    unit = np.where(width > 1, 2 * width, 4)
    cost = RowCost(
        fixed=np.full(LEVELS, 2.0),
        per_token=share,
        per_token_sq=0.01 * share,
        per_sample=3 * share,
        square_factors=np.ones(1),
        unit=unit,
        capacity=capacity * width // unit * unit,
        alone=capacity * width // unit * unit,
        uniform_tokens=0,
        lengths=np.zeros(0, dtype=np.int64),
        max_live=0.0,
        fixed_rows=False,
        allows_padding=True,
    )
    fine = np.where(width > 1, 2 * width, 1)[:, None]
    aligned = -(-tokens // fine) * fine
    ones = np.ones(tokens.size, dtype=np.int64)
    each = aligned, aligned * aligned, ones, -ones, 0 * ones
    return empty_board(cost, each, (dp, count))


def place_by_looking(board: Board, goals: Goals, item: int, level: int) -> float:
    """The most seconds missing up to the target in a place of a level with room."""
    dp, count = board.rows.shape
    most = -np.inf
    for position in range(count):
        for rank in range(0, dp - (1 << level) + 1, 1 << level):
            rows = board.rows[rank : rank + (1 << level), position]
            is_empty = not board.num_items[rows].any()
            row = rows[0]
            if not is_empty and (not board.num_items[row] or board.level[row] != level):
                continue
            limit = board.cost.alone[level] if is_empty else board.cost.capacity[level]
            if board.tokens[row] + board.item_tokens[level, item] <= limit:
                most = max(most, _left(board, goals, level, rank, position)[0])
    return most


@pytest.mark.parametrize("seed", range(6))
def test_the_best_place_misses_most_of_all_with_room(seed: int) -> None:
    rng = np.random.default_rng(seed)
    capacity = (100, 200, 1000)[seed % 3]
    # Few different lengths, so that many places are as good as each other.
    tokens = -np.sort(-rng.choice([16, 17, 40, 60, 90, 150, 300], 150))
    tokens = tokens[tokens <= 2 * capacity]
    board = board_of(tokens, capacity)
    targets = rng.choice([40.0, 120.0, 200.0], (DP, COUNT))
    goals = Goals(targets, float(targets.mean()), 1.15)
    # Rows that are there before are read, too.
    for rank in range(0, DP, 5):
        put(board, tokens.size - 1 - rank, rank, 2, 0)
    places = find_places(board, goals)
    found = 0
    for item in range(tokens.size - DP):
        least = int(np.searchsorted(board.cost.alone, board.item_tokens[0, item]))
        level = int(rng.integers(least, LEVELS))
        leaf = best_leaf(places.missing[level], places.room[level], board.item_tokens[level, item])
        most = place_by_looking(board, goals, item, level)
        if leaf < 0:
            assert most == -np.inf
            continue
        blocks = DP >> level
        rank, position = (leaf % blocks) << level, leaf // blocks
        assert _left(board, goals, level, rank, position)[0] == most
        put_into_place(board, goals, places, item, rank, position, level)
        found += 1
    assert found > 40
    assert len(set(board.level[board.num_items > 0].tolist())) > 1
