"""Places found in trees are those that a look at every cell finds."""

from __future__ import annotations

import numpy as np
import pytest

from megapack.planner.board import Board, RowCost, clone, empty_board, first_rank, fits, put
from megapack.planner.fill import (
    FillRule,
    Goals,
    best_place,
    close_gaps,
    fill_board,
    find_places,
    place_value,
    put_into_place,
)

pytestmark = pytest.mark.unit

DP, COUNT, LEVELS = 13, 7, 4
NONE = np.zeros(1, dtype=np.int64)


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
    pieces = (0 * ones, 0 * ones, -ones)
    return empty_board(cost, aligned, aligned * aligned, ones, pieces, (dp, count))


def place_by_looking(
    board: Board, goals: Goals, item: int, least: int
) -> tuple[float, tuple[int, int, int]]:
    """The least value, and the first place that has it."""
    dp, count = board.rows.shape
    best = (np.inf, (-1, 0, 0))
    for k in range(least, LEVELS):
        for position in range(count):
            for rank in range(0, dp - (1 << k) + 1, 1 << k):
                rows = board.rows[rank : rank + (1 << k), position]
                is_empty = not board.num_items[rows].any()
                row = rows[0]
                if not is_empty and (not board.num_items[row] or board.level[row] != k):
                    continue
                limit = board.cost.alone[k] if is_empty else board.cost.capacity[k]
                if board.tokens[row] + board.item_tokens[k, item] > limit:
                    continue
                value = place_value(board, goals, item, k, rank, position)
                if value < best[0]:
                    best = (value, (rank, position, k))
    return best


@pytest.mark.parametrize("seed", range(6))
def test_the_best_place_is_the_best_of_all_cells(seed: int) -> None:
    rng = np.random.default_rng(seed)
    capacity = (100, 200, 1000)[seed % 3]
    # Few different lengths, so that many places are as good as each other.
    tokens = -np.sort(-rng.choice([16, 17, 40, 60, 90, 150, 300], 150))
    tokens = tokens[tokens <= 2 * capacity]
    board = board_of(tokens, capacity)
    targets = rng.choice([40.0, 120.0, 200.0], COUNT)
    goals = Goals(targets, float(targets.mean()), 1.15)
    # Rows that are there before are read, too.
    for rank in range(0, DP, 5):
        put(board, tokens.size - 1 - rank, rank, 2, 0)
    places = find_places(board, goals, int(tokens.min()))
    found = 0
    for item in range(tokens.size - DP):
        least = int(np.searchsorted(board.cost.alone, board.item_tokens[0, item]))
        wanted = place_by_looking(board, goals, item, least)[1]
        assert best_place(board, places, goals, item, least, LEVELS - 1) == wanted
        if wanted[0] >= 0:
            put_into_place(board, places, goals, item, *wanted)
            found += 1
    assert found > 40
    assert len(set(board.level[board.num_items > 0].tolist())) > 1


def test_a_place_on_a_large_board_is_the_best_but_for_a_unit_of_padding() -> None:
    """64 ranks times 8 positions, of which hundreds differ by less."""
    tokens = -np.sort(-np.random.default_rng(0).integers(30, 60, 1200))
    board = board_of(tokens, 300, dp=64, count=8)
    goals = Goals(np.full(8, 900.0), 900.0, 1.15)
    places = find_places(board, goals, int(tokens.min()))
    above = []
    for item in range(tokens.size):
        rank, position, k = best_place(board, places, goals, item, 0, LEVELS - 1)
        if item % 60 == 0:
            value = place_value(board, goals, item, k, rank, position)
            padding = board.cost.per_token[k] * board.cost.unit[k] / goals.mean
            above.append((value - place_by_looking(board, goals, item, 0)[0]) / padding)
        put_into_place(board, places, goals, item, rank, position, k)
    assert 0 <= min(above) < max(above) < 1


@pytest.mark.parametrize("seed", range(4))
def test_small_items_go_where_most_is_missing_among_rows_with_room(seed: int) -> None:
    rng = np.random.default_rng(seed)
    # Full rows of few seconds and roomy ones of many, so that most rows that are tried are full.
    tokens = np.array([90] * 60 + [45] * 30 + sorted(rng.integers(1, 30, 300).tolist())[::-1])
    board = board_of(tokens, 100)
    board = board._replace(item_samples=np.where(tokens == 45, 400, 1))
    rule = FillRule(
        np.arange(tokens.size), np.zeros_like(tokens), np.full(COUNT, 2000.0), np.zeros_like(tokens)
    )
    for item in range(90):
        put(board, item, item % DP, item // DP, 0)
    wanted = clone(board)
    # About 4,500 tokens, and room for 2,350.
    assert not fill_board(board, rule, rule.order[90:], 1.15, NONE, 0.0)
    for item in rule.order[90:].tolist():
        if board.row_of[item] < 0:
            break
        missing = 2000.0 - wanted.row_seconds
        open_rows = [r for r in range(DP * COUNT) if fits(wanted, r, 0, -1, item)]
        cells = {int(wanted.rows[at]): at for at in np.ndindex(DP, COUNT)}
        best = max(open_rows, key=lambda row: missing[row])
        assert missing[board.row_of[item]] == missing[best]
        rank, position = cells[int(board.row_of[item])]
        put(wanted, item, rank, position, 0)
    assert not [r for r in range(DP * COUNT) if fits(wanted, r, 0, -1, item)]


def test_the_slowest_rows_close_gaps() -> None:
    tokens = np.arange(1, 120)
    board = board_of(tokens, 4000)
    for item in range(tokens.size):
        put(board, item, item % 4, item % COUNT, 0)
    before = clone(board)
    assert close_gaps(board, np.zeros_like(tokens))
    assert (board.num_items[board.rows] > 0).all()
    assert all(first_rank(board, rank, 0) == rank for rank in range(DP))
    # The first gap has the last item of what was the slowest row.
    slowest = int(before.row_seconds.argmax())
    gap = int(np.flatnonzero(before.num_items[before.rows.ravel()] == 0)[0])
    assert board.row_of[before.head[slowest]] == before.rows.ravel()[gap]
