"""The simulated seconds of a board's ranks, in Megatron's order or in an order of its own.

A split backward leaves its weight gradients (W) to the stage, which may run them at any later time.
The forwards and backwards of a stage keep their order. Where the next one waits for another stage,
the stage runs the W's of its earlier backwards: first in, first out, as long as they end before the
wait does, or not much later. With pp=2 and two rows whose forward, backward and W take 1 s each:

    stage 0   0F0 1F0 .   0B0 0W0 1B0 1W0
    stage 1   .   0F0 0B0 1F0 1B0 0W0 1W0

A row is held until its W. Where the next forward would put more tokens on the stage than it may
hold, W's run first, so memory is not the price.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megapack.base.arrays import Floats, Ints
from megapack.base.jit import kernel
from megapack.base.loops import largest
from megapack.pipeline.kernels import RankOps, coupled_seconds, peak_live, rank_seconds
from megapack.plan.order import Operation, group_table, interleave, stage_lists
from megapack.planner.board import (
    Board,
    first_rank,
    microbatch_tokens,
    row_seconds,
    row_tokens,
    slowest,
)


class OwnOrders(NamedTuple):
    """Orders of operations that differ from Megatron's: chains run their backwards in reverse, and
    weight gradients may be apart."""

    chunk_weights: Floats
    """float64 [pp * vpp]: relative seconds of the chunks."""
    pp: int
    vpp: int
    group: int
    """G."""
    p2p: float
    """Seconds from the end of an operation to the arrival of its result on another stage."""
    cap: float
    """Tokens that a stage may hold, each chunk counted whole; inf without a cap."""
    alignment: int
    """Cuts between pieces are at multiples of so many tokens."""
    forward_only: bool
    backward_ratio: float
    """Backward seconds over forward seconds, W included."""
    weight_ratio: float
    """Seconds of a W over those of the forward without attention; 0 if backwards are joint."""
    split: bool
    """Whether backwards leave weight gradients to W's."""
    patience: float
    """A W may end later than the wait does, by this part of its own seconds. With 0.75, a W of 4 s
    starts if the wait is 1 s or longer."""
    ops: Ints
    """int64 [orders, most operations, 5], written: stage, micro-batch, chunk in the model, kind and
    waits_for of `StepOrder`, without W's. There is one order for each rank, or one for all ranks
    where these wait for each other. They change with the places of chains."""
    num_ops: Ints
    """int64 [orders], written."""
    turned: Ints
    """int64 [orders, M], written: the micro-batch whose backward runs k-th among those of its
    chunk."""


class Clock(NamedTuple):
    """How ranks run their micro-batches."""

    ops: RankOps
    """Megatron's operations for each M that occurs, one after the other."""
    bounds: Ints
    """int64 [dp, 2]: rank r's operations are those from bounds[r, 0] to bounds[r, 1]."""
    lockstep: bool
    """Ranks wait for each other at every micro-batch."""


# In the functions below `own` is None if ranks run in Megatron's order. numba then leaves the code
# of own orders out: it is a third of the compiling of a planner that has none.


@kernel
def score_all(board: Board, clock: Clock, own: OwnOrders | None) -> float:
    """Simulate every rank and write `board.seconds`; returns the step's seconds."""
    for rank in range(board.counts.size):
        if own is not None:
            set_order(board, own, rank)
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
        ran = np.empty((own.pp, 2 * own.ops.shape[1] // own.pp), dtype=np.int64)
        num_ran = np.empty(own.pp, dtype=np.int64)
        return run_rank(board, clock, own, rank, own.patience, ran, num_ran)
    cost = board.cost
    count = board.counts[rank]
    first = 0 if clock.lockstep else rank
    last = board.counts.size if clock.lockstep else rank + 1
    forward = np.zeros(count)
    for position in range(count):
        for other in range(first, last):
            seconds = board.row_seconds[board.rows[other, position]]
            forward[position] = max(forward[position], seconds)
    ops = _ops_of(clock, rank)
    if cost.max_live > 0:
        amounts = np.empty(count)
        for position in range(count):
            amounts[position] = microbatch_tokens(board, rank, position)
        if peak_live(ops, amounts) > cost.max_live:
            return np.inf
    return rank_seconds(ops, forward, np.empty(ops.stage.size))


@kernel
def score_shared(board: Board, clock: Clock, end: Floats) -> float:
    """Simulated seconds of a step whose ranks share rows; inf above the cap on live tokens, or if
    padding is not allowed and a row has no item.

    Args:
        end: float64 [dp, operations], written: when each operation ends. In lockstep all ranks
            are alike, and only the first one is written.
    """
    cost = board.cost
    ops = clock.ops
    dp, count = board.rows.shape
    ranks = 1 if clock.lockstep else dp
    forward = np.zeros((ranks, count))
    first = np.zeros((ranks, count), dtype=np.int64)
    amounts = np.empty(count)
    for rank in range(dp):
        for position in range(count):
            row = board.rows[rank, position]
            if board.num_items[row] == 0 and not cost.allows_padding:
                return np.inf
            amounts[position] = microbatch_tokens(board, rank, position) / (1 << board.level[row])
            if clock.lockstep:
                forward[0, position] = max(forward[0, position], board.row_seconds[row])
            else:
                forward[rank, position] = board.row_seconds[row]
                first[rank, position] = first_rank(board, rank, position)
        if cost.max_live > 0 and peak_live(ops, amounts) > cost.max_live:
            return np.inf
    return coupled_seconds(ops, forward, first, end)


@kernel
def _ops_of(clock: Clock, rank: int) -> RankOps:
    """Megatron's operations of one rank."""
    first = clock.bounds[rank, 0]
    last = clock.bounds[rank, 1]
    ops = clock.ops
    return RankOps(
        ops.stage[first:last],
        ops.microbatch[first:last],
        ops.held[first:last],
        ops.waits_for[first:last],
        ops.scale[first:last],
        ops.pp,
        ops.p2p,
    )


@kernel
def run_rank(
    board: Board,
    clock: Clock,
    own: OwnOrders,
    rank: int,
    patience: float,
    ran: Ints,
    num_ran: Ints,
) -> float:
    """Simulated seconds of a rank in its own order, or of the step in lockstep; inf if a stage
    breaks its cap.

    Args:
        ran: int64 [pp, 2 * operations / pp], written: what each stage runs, in this order: the
            index of an F or B, or -1 - index for the W of this B.
        num_ran: int64 [pp], written: how many these are.
    """
    cost = board.cost
    count = board.counts[rank]
    times = _Times(np.zeros(count), np.zeros(count), np.zeros(count), np.zeros(count))
    first = 0 if clock.lockstep else rank
    last = board.counts.size if clock.lockstep else rank + 1
    for k in range(count):
        for other in range(first, last):
            row = board.rows[other, k]
            tokens = board.tokens[row]
            times.forward[k] = max(times.forward[k], board.row_seconds[row])
            seconds = row_seconds(cost, 0, tokens, 0, board.num_samples[row])
            times.weights[k] = max(times.weights[k], own.weight_ratio * seconds)
            times.held[k] = max(times.held[k], float(row_tokens(cost, 0, tokens)))
        whole = own.backward_ratio * times.forward[k]
        times.weights[k] = min(times.weights[k], whole)
        times.backward[k] = whole - times.weights[k]
    if own.forward_only:
        # Nothing is kept in a pass without backwards: its peak is the largest micro-batch.
        if largest(times.held) > own.cap:
            return np.inf
        times.held[:] = 0
    return _filled_seconds(own, own.ops[rank, : own.num_ops[rank]], times, patience, ran, num_ran)


class _Times(NamedTuple):
    """What the micro-batches of a DP rank cost in a chunk of weight 1. Arrays are float64 [M]."""

    forward: Floats
    """Seconds of the forward."""
    backward: Floats
    """Seconds of the backward, without what is left to the W."""
    weights: Floats
    """Seconds of the W; all 0 if backwards are not split."""
    held: Floats
    """Tokens that a stage holds from the forward to the W, each chunk counted whole."""


@kernel
def _filled_seconds(
    own: OwnOrders, ops: Ints, times: _Times, patience: float, ran: Ints, num_ran: Ints
) -> float:
    """`run_rank` of the operations `ops`, as in `OwnOrders`."""
    count = ops.shape[0]
    free = np.zeros(own.pp)
    live = np.zeros(own.pp)
    end = np.empty(count)
    # Backwards whose W has not run: a queue per stage, with its first entry and its end.
    queue = np.empty((own.pp, count // own.pp), dtype=np.int64)
    first = np.zeros(own.pp, dtype=np.int64)
    last = np.zeros(own.pp, dtype=np.int64)
    num_ran[:] = 0
    for op in range(count):
        stage = ops[op, 0]
        microbatch = ops[op, 1]
        is_forward = ops[op, 3] == 0
        source = ops[op, 4]
        ready = end[source] + own.p2p if source < count else 0.0
        held = times.held[microbatch]
        while first[stage] < last[stage]:
            waiting = queue[stage, first[stage]]
            seconds = times.weights[ops[waiting, 1]] * own.chunk_weights[ops[waiting, 2]]
            fits = free[stage] + (1 - patience) * seconds <= ready and ready > free[stage]
            is_full = is_forward and live[stage] + held > own.cap
            if not fits and not is_full:
                break
            free[stage] += seconds
            live[stage] -= times.held[ops[waiting, 1]]
            ran[stage, num_ran[stage]] = -1 - waiting
            num_ran[stage] += 1
            first[stage] += 1
        seconds = times.forward[microbatch] if is_forward else times.backward[microbatch]
        end[op] = max(free[stage], ready) + own.chunk_weights[ops[op, 2]] * seconds
        free[stage] = end[op]
        ran[stage, num_ran[stage]] = op
        num_ran[stage] += 1
        if is_forward:
            live[stage] += held
            if live[stage] > own.cap:
                return np.inf
        elif own.split:
            queue[stage, last[stage]] = op
            last[stage] += 1
        else:
            live[stage] -= held
    for stage in range(own.pp):
        for k in range(first[stage], last[stage]):
            waiting = queue[stage, k]
            free[stage] += times.weights[ops[waiting, 1]] * own.chunk_weights[ops[waiting, 2]]
            ran[stage, num_ran[stage]] = -1 - waiting
            num_ran[stage] += 1
    return float(largest(free))


@kernel
def chain_at(board: Board, rank: int, position: int) -> int:
    """The chain of a rank's micro-batch; -1 without one."""
    piece = board.piece_of[board.rows[rank, position]]
    return int(board.chain[piece]) if piece >= 0 else -1


@kernel
def unit_end(board: Board, rank: int, position: int) -> int:
    """The position after the unit of a position: its chain, or it alone."""
    chain = chain_at(board, rank, position)
    last = position + 1
    if chain >= 0:
        while last < board.counts[rank] and chain_at(board, rank, last) == chain:
            last += 1
    return last


@kernel
def set_order(board: Board, own: OwnOrders, rank: int) -> bool:
    """Write a rank's operations where its chains have moved; whether each chain lies within a group
    of G micro-batches. If not, nothing is written."""
    turned = _turned_backwards(board, rank)
    count = turned.size
    if own.num_ops[rank] > 0 and np.all(turned == own.turned[rank, :count]):
        return True
    backwards = turned
    if own.vpp > 1:
        for k in range(count):
            if turned[k] // own.group != k // own.group:
                return False
        table = group_table(count, own.vpp, own.group)
        backwards = np.arange(table.shape[1]) + turned[table[0]] - table[0]
    stages, ends = stage_lists(own.pp, own.vpp, count, own.group, own.forward_only, backwards)
    columns, _ = interleave(stages, ends, own.pp, own.vpp)
    num_ops = columns.shape[1]
    own.num_ops[rank] = num_ops
    own.turned[rank, :count] = turned
    for op in range(num_ops):
        for k in range(5):
            own.ops[rank, op, k] = columns[k, op]
    return True


@kernel
def _turned_backwards(board: Board, rank: int) -> Ints:
    """The micro-batch whose backward runs k-th: chains run theirs in reverse. int64 [M]."""
    count = board.counts[rank]
    turned = np.arange(count)
    position = 0
    while position < count:
        last = unit_end(board, rank, position)
        for k in range(position, last):
            turned[k] = position + last - 1 - k
        position = last
    return turned


def order_lines(ops: Ints, ran: Ints, num_ran: Ints) -> tuple[str, ...]:
    """What each stage runs, as `StepOrder.lines`.

    Args:
        ops: int64 [operations, 5], see `OwnOrders.ops`.
        ran, num_ran: of `run_rank`.
    """
    pp = num_ran.size
    columns = [column.tolist() for column in (ops[:, 1], ops[:, 2] // pp, ops[:, 3])]
    lines = []
    for stage in range(pp):
        texts = []
        for index in ran[stage, : num_ran[stage]].tolist():
            op = index if index >= 0 else -1 - index
            microbatch, chunk, kind = (column[op] for column in columns)
            texts.append(str(Operation("W" if index < 0 else "FB"[kind], microbatch, chunk)))
        lines.append(" ".join(texts))
    return tuple(lines)
