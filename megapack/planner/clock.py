"""The simulated seconds of a board's ranks, in Megatron's order or in an order of its own."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megapack.base.arrays import Floats
from megapack.base.jit import kernel
from megapack.pipeline.kernels import RankOps, coupled_seconds, peak_live, rank_seconds
from megapack.planner.board import (
    Board,
    block_width,
    kind_seconds,
    microbatch_tokens,
    slowest,
)
from megapack.planner.own_orders import PATIENCE, OwnOrders, choose_order, run_ranks


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


@kernel
def score_rank(board: Board, clock: Clock, own: OwnOrders | None, rank: int) -> float:
    """Simulated seconds of a rank, or of the step in lockstep; inf above the cap on live tokens.

    In lockstep each micro-batch takes as long as on the slowest rank.
    """
    if own is not None:
        return _score_own(board, clock, own, rank, np.empty(own.ops.shape[1]))
    cost = board.cost
    count = board.rows.shape[1]
    first = 0 if clock.lockstep else rank
    last = board.rows.shape[0] if clock.lockstep else rank + 1
    kinds = cost.square_factors.size
    forward = np.zeros(kinds * count)
    for kind in range(kinds):
        for position in range(count):
            column = kind * count + position
            for other in range(first, last):
                seconds = kind_seconds(board, board.rows[other, position], kind)
                forward[column] = max(forward[column], seconds)
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
def _score_own(board: Board, clock: Clock, own: OwnOrders, rank: int, end: Floats) -> float:
    """`score_rank` of a rank that chooses its order, or of all in lockstep; see `choose_order`."""
    if clock.lockstep:
        return choose_order(board, own, 0, 0, board.rows.shape[0], end)
    return choose_order(board, own, rank, rank, rank + 1, end)


@kernel
def score_shared(board: Board, clock: Clock, own: OwnOrders | None, end: Floats) -> float:
    """Simulated seconds of a step whose ranks share rows; inf above the cap on live tokens, or if
    padding is not allowed and a row has no item. Writes `board.seconds`.

    Args:
        end: float64 [operations, dp], written: when each operation ends. In lockstep all ranks
            are alike, and it has one column.
    """
    if own is not None:
        return _score_blocks(board, clock, own, end)
    cost = board.cost
    ops = clock.ops
    dp, count = board.rows.shape
    ranks = 1 if clock.lockstep else dp
    kinds = cost.square_factors.size
    forward = np.zeros((kinds * count, ranks))
    first = np.zeros((count, ranks), dtype=np.int64)
    amounts = np.empty(count)
    for rank in range(dp):
        for position in range(count):
            row = board.rows[rank, position]
            if board.num_items[row] == 0 and not cost.allows_padding:
                return np.inf
            width = 1 << board.level[row]
            if cost.max_live > 0:
                amounts[position] = microbatch_tokens(board, rank, position) / width
            for kind in range(kinds):
                column = kind * count + position
                seconds = kind_seconds(board, row, kind)
                own_rank = 0 if clock.lockstep else rank
                forward[column, own_rank] = max(forward[column, own_rank], seconds)
            if not clock.lockstep:
                first[position, rank] = rank - rank % width
        if cost.max_live > 0 and peak_live(ops, amounts) > cost.max_live:
            return np.inf
    seconds = coupled_seconds(ops, forward, first, end)
    _set_seconds(board, ops, end)
    return seconds


@kernel
def _set_seconds(board: Board, ops: RankOps, end: Floats) -> None:
    """Write `board.seconds`: when the last operation of each rank ends."""
    last = np.full(ops.pp, -1, dtype=np.int64)
    missing = ops.pp
    op = ops.stage.size - 1
    while missing > 0:
        if last[ops.stage[op]] < 0:
            last[ops.stage[op]] = op
            missing -= 1
        op -= 1
    for rank in range(end.shape[1]):
        board.seconds[rank] = 0.0
        for stage in range(ops.pp):
            board.seconds[rank] = max(board.seconds[rank], end[last[stage], rank])


@kernel
def _score_blocks(board: Board, clock: Clock, own: OwnOrders, end: Floats) -> float:
    """`score_shared` of own orders: a rank that shares no row chooses, and each block of ranks that
    share rows runs the last order."""
    for rank in range(board.rows.shape[0]):
        for position in range(board.rows.shape[1]):
            if board.num_items[board.rows[rank, position]] == 0 and not board.cost.allows_padding:
                return np.inf
    latest = 0.0
    rank = 0
    own_end = np.empty(end.shape[0])
    # The search needs no list of what stages run.
    no_list = np.empty((0, 0), dtype=np.int64)
    while rank < end.shape[1]:
        width = 1 if clock.lockstep else block_width(board, rank)
        if width == 1:
            seconds = _score_own(board, clock, own, rank, own_end)
            for op in range(own_end.size):
                end[op, rank] = own_end[op]
        else:
            order = own.num_ops.size - 1
            seconds = run_ranks(board, False, own, rank, width, order, PATIENCE, no_list, end, rank)
        latest = max(latest, seconds)
        for _ in range(width):
            board.seconds[rank] = seconds
            rank += 1
    return latest
