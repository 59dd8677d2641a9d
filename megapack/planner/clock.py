"""The simulated seconds of a board's ranks, in Megatron's order or in an order of its own."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megapack.base.jit import inner, kernel
from megapack.pipeline.kernels import RankOps, coupled_seconds, peak_live, rank_seconds
from megapack.planner.board import Board, block_width, kind_seconds, microbatch_tokens, slowest
from megapack.planner.orders import OwnOrders, choose_order


class Clock(NamedTuple):
    """How ranks run their micro-batches."""

    ops: RankOps
    """Megatron's operations of a rank, the same of each."""
    lockstep: bool
    """Ranks wait for each other at every micro-batch."""


# In the functions below `own` is None if ranks run in Megatron's order. numba then leaves the code
# of own orders out: it is a third of the compiling of a planner that has none.


@kernel
def score_all(board: Board, clock: Clock, own: OwnOrders | None) -> float:
    """Simulate every rank and write `board.seconds`; returns the step's seconds."""
    for rank in range(board.rows.shape[0]):
        if clock.lockstep and rank > 0:
            board.seconds[rank] = board.seconds[0]
        else:
            board.seconds[rank] = score_rank(board, clock, own, rank)
    return float(board.seconds[slowest(board)])


@inner
def score_rank(board: Board, clock: Clock, own: OwnOrders | None, rank: int) -> float:
    """Simulated seconds of a rank, or of the step in lockstep; inf above the cap on live tokens.

    In lockstep each micro-batch takes as long as on the slowest rank.
    """
    first = 0 if clock.lockstep else rank
    last = board.rows.shape[0] if clock.lockstep else rank + 1
    if own is not None:
        return choose_order(board, own, first, last, np.empty((0, 0, 0), dtype=np.int64))
    cost = board.cost
    count = board.rows.shape[1]
    kinds = cost.square_factors.size
    forward = np.zeros(kinds * count)
    for at in range(kinds * count):
        for other in range(first, last):
            seconds = kind_seconds(board, board.rows[other, at % count], at // count)
            forward[at] = max(forward[at], seconds)
    ops = clock.ops
    if cost.max_live > 0:
        amounts = np.empty(count)
        for other in range(first, last):
            for position in range(count):
                amounts[position] = microbatch_tokens(board, other, position)
            if peak_live(ops, amounts) > cost.max_live:
                return np.inf
    return rank_seconds(ops, forward, np.empty(ops.stage.size))


@kernel
def score_shared(board: Board, clock: Clock, own: OwnOrders | None) -> float:
    """Simulated seconds of a step whose ranks share rows; inf above the cap on live tokens, or if
    padding is not allowed and a row has no item. Writes `board.seconds`."""
    dp, count = board.rows.shape
    for rank in range(dp if not board.cost.allows_padding else 0):
        for position in range(count):
            if board.num_items[board.rows[rank, position]] == 0:
                board.seconds[rank] = np.inf
                return np.inf
    if own is None:
        return _score_coupled(board, clock)
    rank = 0
    while rank < dp:
        width = dp if clock.lockstep else block_width(board, rank)
        nothing = np.empty((0, 0, 0), dtype=np.int64)
        seconds = choose_order(board, own, rank, rank + width, nothing)
        for _ in range(width):
            board.seconds[rank] = seconds
            rank += 1
    return float(board.seconds[slowest(board)])


@inner
def _score_coupled(board: Board, clock: Clock) -> float:
    """`score_shared` in Megatron's order."""
    cost = board.cost
    ops = clock.ops
    dp, count = board.rows.shape
    # In lockstep all ranks are alike, and one is simulated.
    ranks = 1 if clock.lockstep else dp
    kinds = cost.square_factors.size
    forward = np.zeros((kinds * count, ranks))
    first = np.zeros((count, ranks), dtype=np.int64)
    amounts = np.empty(count)
    for rank in range(dp):
        column = 0 if clock.lockstep else rank
        for position in range(count):
            row = board.rows[rank, position]
            width = 1 << board.level[row]
            amounts[position] = microbatch_tokens(board, rank, position) / width
            for kind in range(kinds):
                at = kind * count + position
                forward[at, column] = max(forward[at, column], kind_seconds(board, row, kind))
            first[position, column] = 0 if clock.lockstep else rank - rank % width
        if cost.max_live > 0 and peak_live(ops, amounts) > cost.max_live:
            board.seconds[rank] = np.inf
            return np.inf
    end = np.empty((ops.stage.size, ranks))
    seconds = coupled_seconds(ops, forward, first, end)
    # When the last operation of each rank ends.
    last = np.zeros(ops.pp, dtype=np.int64)
    for op in range(ops.stage.size):
        last[ops.stage[op]] = op
    for rank in range(dp):
        column = 0 if clock.lockstep else rank
        board.seconds[rank] = 0.0
        for stage in range(ops.pp):
            board.seconds[rank] = max(board.seconds[rank], end[last[stage], column])
    return seconds
