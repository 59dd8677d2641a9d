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
from megapack.plan.order import KINDS, group_table, interleave, operation_texts, stage_lists
from megapack.planner.board import (
    Board,
    kind_seconds,
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
    chunk_kinds: Ints
    """int64 [pp * vpp]: their kinds, see `pipeline.kernels.RankOps`."""
    pp: int
    vpp: int
    group: int
    """G."""
    p2p: float
    """Seconds from the end of an operation to the arrival of its result on another stage."""
    cap: float
    """Tokens that a stage may hold, each chunk counted whole; inf without a cap."""
    heeds_cap: bool
    """Whether a stage puts forwards off that would break the cap. If not, such an order takes inf
    seconds."""
    alignment: int
    """Cuts between pieces are at multiples of so many tokens."""
    least_piece: int
    """Tokens of the shortest piece."""
    forward_only: bool
    backward_ratio: float
    """Backward seconds over forward seconds, W included."""
    weight_ratio: float
    """Seconds of a W over those of the forward without attention; 0 if backwards are joint."""
    split: bool
    """Whether backwards leave weight gradients to W's."""
    is_common: bool
    """Whether ranks meet in layers, as those of a shared row do, and so all run one order of
    forwards and backwards, the first of `ops`."""
    patience: float
    """A W may end later than the wait does, by this part of its own seconds. With 0.75, a W of 4 s
    starts if the wait is 1 s or longer."""
    ops: Ints
    """int64 [dp, most operations, 5], written: stage, micro-batch, chunk in the model, kind and
    waits_for of `StepOrder`, without W's. They change with the places of chains, and with rows'
    tokens where they heed the cap."""
    num_ops: Ints
    """int64 [dp], written."""
    turned: Ints
    """int64 [dp, M], written: the micro-batch whose backward runs k-th among those of its
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
        if own.heeds_cap:
            set_order(board, own, rank)
        ran, num_ran, end = room_to_run(own, 1)
        return run_ranks(board, clock, own, rank, own.patience, ran, num_ran, end)
    cost = board.cost
    count = board.counts[rank]
    first = 0 if clock.lockstep else rank
    last = board.counts.size if clock.lockstep else rank + 1
    kinds = cost.square_factors.size
    forward = np.zeros(kinds * count)
    for kind in range(kinds):
        for position in range(count):
            column = kind * count + position
            for other in range(first, last):
                seconds = kind_seconds(board, board.rows[other, position], kind)
                forward[column] = max(forward[column], seconds)
    ops = _ops_of(clock, rank)
    if cost.max_live > 0:
        amounts = np.empty(count)
        for other in range(first, last):
            for position in range(count):
                amounts[position] = microbatch_tokens(board, other, position)
            if peak_live(ops, amounts) > cost.max_live:
                return np.inf
    return rank_seconds(ops, forward, np.empty(ops.stage.size))


@kernel
def score_shared(board: Board, clock: Clock, own: OwnOrders | None, end: Floats) -> float:
    """Simulated seconds of a step whose ranks share rows; inf above the cap on live tokens, or if
    padding is not allowed and a row has no item.

    Args:
        end: float64 [dp, operations], written: when each operation ends. In lockstep all ranks
            are alike, and only the first one is written.
    """
    if own is not None:
        ran, num_ran, _ = room_to_run(own, end.shape[0])
        return run_ranks(board, clock, own, 0, own.patience, ran, num_ran, end)
    cost = board.cost
    ops = clock.ops
    dp, count = board.rows.shape
    ranks = 1 if clock.lockstep else dp
    kinds = cost.square_factors.size
    forward = np.zeros((ranks, kinds * count))
    first = np.zeros((ranks, count), dtype=np.int64)
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
                forward[own_rank, column] = max(forward[own_rank, column], seconds)
            if not clock.lockstep:
                first[rank, position] = rank - rank % width
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
        ops.column[first:last],
        ops.held[first:last],
        ops.waits_for[first:last],
        ops.scale[first:last],
        ops.pp,
        ops.p2p,
    )


@kernel
def room_to_run(own: OwnOrders, num_ranks: int) -> tuple[Ints, Ints, Floats]:
    """Arrays that `run_ranks` writes for so many ranks."""
    num_ops = own.ops.shape[1]
    ran = np.empty((num_ranks * own.pp, 2 * num_ops // own.pp), dtype=np.int64)
    return ran, np.empty(num_ranks * own.pp, dtype=np.int64), np.empty((num_ranks, num_ops))


@kernel
def run_ranks(
    board: Board,
    clock: Clock,
    own: OwnOrders,
    rank: int,
    patience: float,
    ran: Ints,
    num_ran: Ints,
    end: Floats,
) -> float:
    """Simulated seconds of ranks from this one on that wait for each other; inf if a stage breaks
    its cap, or if padding is not allowed and a row of several ranks' has no item.

    These are one rank in its own order, all ranks of a step with wide rows, or one that stands for
    all in lockstep.

    Args:
        ran: int64 [ranks * pp, 2 * operations / pp], written: what each stage of each rank runs, in
            this order: the index of an F or B, or -1 - index for the W of this B.
        num_ran: int64 [ranks * pp], written: how many these are.
        end: float64 [ranks, operations], written: when each F and B ends.
    """
    cost = board.cost
    count = board.counts[rank]
    num_ranks = end.shape[0]
    shape = (num_ranks, count)
    kinds = cost.square_factors.size
    by_kind = (num_ranks, kinds * count)
    times = _Times(np.zeros(by_kind), np.zeros(by_kind), np.zeros(by_kind), np.zeros(shape))
    first = np.empty(shape, dtype=np.int64)
    for d in range(num_ranks):
        for k in range(count):
            width = 1 << board.level[board.rows[rank + d, k]]
            first[d, k] = d - d % width if num_ranks > 1 else 0
            low = 0 if clock.lockstep else rank + d
            high = board.counts.size if clock.lockstep else low + 1
            for other in range(low, high):
                row = board.rows[other, k]
                level = board.level[row]
                if num_ranks > 1 and board.num_items[row] == 0 and not cost.allows_padding:
                    return np.inf
                tokens = board.tokens[row]
                held = row_tokens(cost, level, tokens) / (1 << level)
                seconds = row_seconds(cost, level, tokens, 0, board.num_samples[row])
                for kind in range(kinds):
                    at = kind * count + k
                    whole = kind_seconds(board, row, kind)
                    times.forward[d, at] = max(times.forward[d, at], whole)
                    times.weights[d, at] = max(times.weights[d, at], own.weight_ratio * seconds)
                times.held[d, k] = max(times.held[d, k], held)
            for kind in range(kinds):
                at = kind * count + k
                whole = own.backward_ratio * times.forward[d, at]
                times.weights[d, at] = min(times.weights[d, at], whole)
                times.backward[d, at] = whole - times.weights[d, at]
    if own.forward_only:
        # Nothing is kept in a pass without backwards: its peak is the largest micro-batch.
        for d in range(num_ranks):
            if largest(times.held[d]) > own.cap:
                return np.inf
            times.held[d, :] = 0
    order = 0 if own.is_common else rank
    ops = own.ops[order, : own.num_ops[order]]
    return _filled_seconds(own, ops, times, first, patience, ran, num_ran, end)


class _Times(NamedTuple):
    """What the micro-batches of DP ranks cost in a chunk of weight 1. Arrays are float64
    [ranks, kinds * M], see `pipeline.kernels.RankOps`."""

    forward: Floats
    """Seconds of the forward."""
    backward: Floats
    """Seconds of the backward, without its W."""
    weights: Floats
    """Seconds of the W; all 0 if backwards are not split."""
    held: Floats
    """[ranks, M]: tokens that a stage holds from the forward to the W, each chunk counted whole."""


@kernel
def _filled_seconds(
    own: OwnOrders,
    ops: Ints,
    times: _Times,
    first_rank: Ints,
    patience: float,
    ran: Ints,
    num_ran: Ints,
    end: Floats,
) -> float:
    """`run_ranks` of the operations `ops`, as in `OwnOrders`.

    Args:
        first_rank: int64 [ranks, M], the first rank of those that share the micro-batch and begin
            its operations together.
    """
    num_ranks = end.shape[0]
    count = ops.shape[0]
    num_microbatches = first_rank.shape[1]
    stages = num_ranks * own.pp
    free = np.zeros(stages)
    live = np.zeros(stages)
    # Backwards whose W has not run: a queue per stage, with its first entry and its end.
    queue = np.empty((stages, count // own.pp), dtype=np.int64)
    begun = np.zeros(stages, dtype=np.int64)
    last = np.zeros(stages, dtype=np.int64)
    begin = np.empty(num_ranks)
    num_ran[:] = 0
    for op in range(count):
        microbatch = ops[op, 1]
        weight = own.chunk_weights[ops[op, 2]]
        column = own.chunk_kinds[ops[op, 2]] * num_microbatches + microbatch
        is_forward = ops[op, 3] == 0
        source = ops[op, 4]
        # The first rank of a block comes before the others, and collects the latest begin.
        for d in range(num_ranks):
            stage = d * own.pp + ops[op, 0]
            begin[d] = free[stage]
            if source < count:
                begin[d] = max(begin[d], end[d, source] + own.p2p)
            sharer = first_rank[d, microbatch]
            begin[sharer] = max(begin[sharer], begin[d])
        for d in range(num_ranks):
            stage = d * own.pp + ops[op, 0]
            ready = begin[first_rank[d, microbatch]]
            while begun[stage] < last[stage]:
                waiting = queue[stage, begun[stage]]
                chunk = ops[waiting, 2]
                at = own.chunk_kinds[chunk] * num_microbatches + ops[waiting, 1]
                seconds = times.weights[d, at] * own.chunk_weights[chunk]
                now = free[stage]
                fits = now + (1 - patience) * seconds <= ready and ready > now
                is_full = is_forward and live[stage] + times.held[d, microbatch] > own.cap
                if not fits and not is_full:
                    break
                free[stage] += seconds
                live[stage] -= times.held[d, ops[waiting, 1]]
                ran[stage, num_ran[stage]] = -1 - waiting
                num_ran[stage] += 1
                begun[stage] += 1
        # W's may end later than the wait does.
        for d in range(num_ranks):
            sharer = first_rank[d, microbatch]
            begin[sharer] = max(begin[sharer], free[d * own.pp + ops[op, 0]])
        for d in range(num_ranks):
            stage = d * own.pp + ops[op, 0]
            seconds = times.backward[d, column]
            if is_forward:
                seconds = times.forward[d, column]
            end[d, op] = begin[first_rank[d, microbatch]] + weight * seconds
            free[stage] = end[d, op]
            ran[stage, num_ran[stage]] = op
            num_ran[stage] += 1
            if is_forward:
                live[stage] += times.held[d, microbatch]
                if live[stage] > own.cap:
                    return np.inf
            elif own.split:
                queue[stage, last[stage]] = op
                last[stage] += 1
            else:
                live[stage] -= times.held[d, microbatch]
    for stage in range(stages):
        for k in range(begun[stage], last[stage]):
            waiting = queue[stage, k]
            chunk = ops[waiting, 2]
            at = own.chunk_kinds[chunk] * num_microbatches + ops[waiting, 1]
            free[stage] += times.weights[stage // own.pp, at] * own.chunk_weights[chunk]
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
    """Write a rank's operations where they change; whether backwards in reverse lie within a group
    of G micro-batches. If not, nothing is written."""
    first, last = rank, rank + 1
    if own.is_common:
        rank, first, last = 0, 0, board.counts.size
    turned = _turned_backwards(board, first, last)
    count = turned.size
    is_old = own.num_ops[rank] > 0 and np.all(turned == own.turned[rank, :count])
    if is_old and not own.heeds_cap:
        return True
    held = np.zeros(count)
    if own.heeds_cap:
        for other in range(first, last):
            for k in range(count):
                width = 1 << board.level[board.rows[other, k]]
                held[k] = max(held[k], microbatch_tokens(board, other, k) / width)
    backwards = turned
    if own.vpp > 1:
        for k in range(count):
            if turned[k] // own.group != k // own.group:
                return False
        table = group_table(count, own.vpp, own.group)
        backwards = np.arange(table.shape[1]) + turned[table[0]] - table[0]
    stages, ends = stage_lists(
        own.pp, own.vpp, count, own.group, own.forward_only, backwards, held, own.cap
    )
    columns, _ = interleave(stages, ends, own.pp, own.vpp)
    num_ops = columns.shape[1]
    own.num_ops[rank] = num_ops
    own.turned[rank, :count] = turned
    for op in range(num_ops):
        for k in range(5):
            own.ops[rank, op, k] = columns[k, op]
    return True


@kernel
def _turned_backwards(board: Board, first: int, last: int) -> Ints:
    """The micro-batch whose backward runs k-th in the one order of some ranks, int64 [M].

    Chains run theirs in reverse. Where those of several ranks overlap, their union does.
    """
    count = board.counts[first]
    # Whether a micro-batch continues a chain of the one before it.
    continues = np.zeros(count + 1, dtype=np.bool_)
    for rank in range(first, last):
        before = -1
        for k in range(count):
            chain = chain_at(board, rank, k)
            continues[k] |= chain >= 0 and chain == before
            before = chain
    turned = np.arange(count)
    begin = 0
    for k in range(1, count + 1):
        if not continues[k]:
            for position in range(begin, k):
                turned[position] = begin + k - 1 - position
            begin = k
    return turned


def common_ops(own: OwnOrders) -> RankOps:
    """The operations of the one order of all ranks; what they hold and take is left out."""
    stage, microbatch, _, _, waits_for = np.ascontiguousarray(own.ops[0, : own.num_ops[0]].T)
    none = np.zeros(0, dtype=np.int64)
    ops = RankOps(stage, microbatch, none, none, waits_for, np.zeros(0), own.pp, own.p2p)
    return ops.read_only()


def order_lines(ops: Ints, ran: Ints, num_ran: Ints) -> tuple[str, ...]:
    """What each stage runs, as `StepOrder.lines`.

    Args:
        ops: int64 [operations, 5], see `OwnOrders.ops`.
        ran, num_ran: of a rank, see `run_ranks`.
    """
    pp = num_ran.size
    num_microbatches, vpp = int(ops[:, 1].max()) + 1, int(ops[:, 2].max()) // pp + 1
    texts, _ = operation_texts(num_microbatches, vpp)
    lines = []
    for own, size in zip(ran, num_ran, strict=True):
        index = own[:size]
        op = ops[np.where(index >= 0, index, -1 - index)]
        kind = np.where(index >= 0, op[:, 3], KINDS.index("W"))
        lines.append(" ".join(texts[kind, op[:, 2] // pp, op[:, 1]]))
    return tuple(lines)
