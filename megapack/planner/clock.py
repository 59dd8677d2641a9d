"""The simulated seconds of a board's ranks, in Megatron's order or in an order of its own.

In an order of its own each stage of a rank runs what can begin first: its next forward or its next
backward. So a stage runs forwards ahead while it waits for its first backward, up to twice as many
as in 1F1B. DP ranks that share rows must run one order, which cannot fit all of them: their stages
run their warm-up, and then alternate.

A split backward leaves its weight gradients (W) to the stage, which may run them at any later time:
where it would wait, first in, first out. With pp=2 and two rows whose forward, backward and W take
1 s each:

    stage 0   0F0 1F0 .   0B0 0W0 1B0 1W0
    stage 1   .   0F0 0B0 1F0 1B0 0W0 1W0

A row is held until its W. A forward that would put more tokens on a stage than it may hold is put
off, or W's run first.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megapack.base.arrays import Floats, Ints
from megapack.base.jit import kernel
from megapack.base.loops import largest
from megapack.pipeline.kernels import RankOps, coupled_seconds, peak_live, rank_seconds
from megapack.plan.order import group_table, interleave, stage_lists
from megapack.planner.board import (
    Board,
    chain_at,
    kind_seconds,
    microbatch_tokens,
    row_seconds,
    row_tokens,
    slowest,
)

# A W may end later than the wait in which it begins, by this part of its own seconds: a W of 4 s
# begins if the wait is 1 s or longer. Chosen by hand; a stage that chooses uses any wait.
PATIENCE = 0.75


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
    warmup: Ints
    """int64 [pp]: forwards that each stage may run ahead of its backwards."""
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
    ops: Ints
    """int64 [dp, most operations, 5], written: stage, micro-batch, chunk in the model, kind and
    waits_for of `StepOrder`, without W's."""
    num_ops: Ints
    """int64 [dp], written; 0 without an order: backwards in reverse leave their group of G
    micro-batches, or none keeps the cap."""


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
        return choose_order(board, clock, own, rank)
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
        return run_ranks(board, clock, own, 0, PATIENCE, ran, num_ran, end)
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
    count = board.counts[rank]
    num_ranks = end.shape[0]
    times = _no_times(board, num_ranks, count)
    first = np.zeros((num_ranks, count), dtype=np.int64)
    for d in range(num_ranks):
        if num_ranks > 1:
            for k in range(count):
                row = board.rows[rank + d, k]
                if board.num_items[row] == 0 and not board.cost.allows_padding:
                    return np.inf
                first[d, k] = d - d % (1 << board.level[row])
        low = 0 if clock.lockstep else rank + d
        high = board.counts.size if clock.lockstep else low + 1
        _set_times(board, own, low, high, times, d)
    order = 0 if own.is_common else rank
    if own.num_ops[order] == 0:
        return np.inf
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
def _no_times(board: Board, num_ranks: int, count: int) -> _Times:
    """Times of M micro-batches per rank that `_set_times` writes."""
    by_kind = (num_ranks, board.cost.square_factors.size * count)
    held = np.zeros((num_ranks, count))
    return _Times(np.zeros(by_kind), np.zeros(by_kind), np.zeros(by_kind), held)


@kernel
def _set_times(board: Board, own: OwnOrders, low: int, high: int, times: _Times, d: int) -> None:
    """Write what each micro-batch of ranks `low` to `high` - 1 costs on the slowest of them.

    Args:
        times: written in line d.
    """
    cost = board.cost
    count = times.held.shape[1]
    kinds = cost.square_factors.size
    for k in range(count):
        for other in range(low, high):
            row = board.rows[other, k]
            level = board.level[row]
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
            times.held[d, k] = np.inf if times.held[d, k] > own.cap else 0.0


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
def choose_order(board: Board, clock: Clock, own: OwnOrders, rank: int) -> float:
    """Write the operations of a rank whose stages choose what they run, or those of all ranks in
    lockstep.

    Returns:
        Simulated seconds of the rank, or of the step in lockstep; inf if backwards in reverse leave
        their group of G micro-batches, or if no order keeps the cap.
    """
    first, last = rank, rank + 1
    if clock.lockstep:
        rank, first, last = 0, 0, board.counts.size
    own.num_ops[rank] = 0
    backwards = _backwards(board, own, first, last)
    if backwards.size == 0:
        return np.inf
    times = _no_times(board, 1, board.counts[rank])
    _set_times(board, own, first, last, times, 0)
    seconds, own.num_ops[rank] = _choose(own, times, backwards, own.ops[rank])
    return seconds


@kernel
def set_order(board: Board, own: OwnOrders, rank: int) -> None:
    """Write the operations of a rank, or of all if they run one order, whose stages run their
    warm-up and then alternate. What can begin first on one rank may not on another, so this is the
    order of ranks that share rows."""
    first, last = rank, rank + 1
    if own.is_common:
        rank, first, last = 0, 0, board.counts.size
    own.num_ops[rank] = 0
    count = board.counts[rank]
    backwards = _backwards(board, own, first, last)
    if backwards.size == 0:
        return
    times = _no_times(board, 1, count)
    _set_times(board, own, first, last, times, 0)
    stages, ends = stage_lists(
        own.warmup, own.vpp, count, own.group, own.forward_only, backwards, times.held[0], own.cap
    )
    columns, _ = interleave(stages, ends, own.pp, own.vpp)
    own.num_ops[rank] = columns.shape[1]
    for op in range(columns.shape[1]):
        for k in range(5):
            own.ops[rank, op, k] = columns[k, op]


@kernel
def _backwards(board: Board, own: OwnOrders, first: int, last: int) -> Ints:
    """The virtual micro-batch of each backward in the one order of some ranks, int64 [M * vpp]; []
    if those in reverse leave their group."""
    turned = _turned_backwards(board, first, last)
    if own.vpp == 1:
        return turned
    for k in range(turned.size):
        if turned[k] // own.group != k // own.group:
            return turned[:0]
    table = group_table(turned.size, own.vpp, own.group)
    # Inside a chunk's part of a group, micro-batches are counted from the part's first one.
    backwards: Ints = np.arange(table.shape[1]) + turned[table[0]] - table[0]
    return backwards


@kernel
def _choose(own: OwnOrders, times: _Times, backwards: Ints, ops: Ints) -> tuple[float, int]:
    """Seconds of a rank whose stages choose what they run, and the number of forwards and
    backwards; inf and 0 if all wait for each other.

    A stage runs what can begin first of its next forward and its next backward, the forward if both
    can, and a W in each wait. A forward may be no further ahead than the warm-up, and break no cap.
    Operations begin in the order of time, so a stage knows all results that it could run with.

    Args:
        times: of one rank.
        backwards: int64 [M * vpp], the virtual micro-batch of each backward.
        ops: int64 [operations, 5], written.
    """
    pp, vpp = own.pp, own.vpp
    count = times.held.shape[1]
    total = count * vpp
    num_backwards = 0 if own.forward_only else total
    size = (total + num_backwards) * pp
    table = group_table(count, vpp, own.group)
    end = np.empty(size)
    # The index of each F and B that has run, by chunk and micro-batch.
    ran = np.full((2, pp * vpp, count), -1, dtype=np.int64)
    # Per stage: F's, B's and W's that have run, forwards that its next backward needs, when it is
    # free, and tokens that it holds.
    num = np.zeros((pp, 3), dtype=np.int64)
    needed = np.full(pp, backwards[0] + 1)
    free = np.zeros(pp)
    live = np.zeros(pp)
    # And what it runs next: when, which kind, and what the next F and B wait for. It is stale once
    # the stage has run something, or a result has come.
    begin = np.empty(pp)
    kind = np.empty(pp, dtype=np.int64)
    source = np.empty((pp, 2), dtype=np.int64)
    is_stale = np.ones(pp, dtype=np.bool_)
    done = 0
    while True:
        chosen = 0
        for stage in range(pp):
            if is_stale[stage]:
                is_stale[stage] = False
                forward_at = np.inf
                backward_at = np.inf
                k = num[stage, 0]
                if k < min(total, needed[stage] + own.warmup[stage]):
                    microbatch = table[0, k]
                    if live[stage] + times.held[0, microbatch] <= own.cap:
                        chunk = table[1, k] * pp + stage
                        if chunk == 0:
                            source[stage, 0] = size
                            forward_at = free[stage]
                        elif ran[0, chunk - 1, microbatch] >= 0:
                            source[stage, 0] = ran[0, chunk - 1, microbatch]
                            forward_at = max(free[stage], end[source[stage, 0]] + own.p2p)
                if num[stage, 1] < num_backwards:
                    k = backwards[num[stage, 1]]
                    microbatch = table[0, k]
                    chunk = (vpp - 1 - table[1, k]) * pp + stage
                    if chunk == pp * vpp - 1:
                        if ran[0, chunk, microbatch] >= 0:
                            source[stage, 1] = size
                            backward_at = free[stage]
                    elif ran[1, chunk + 1, microbatch] >= 0:
                        source[stage, 1] = ran[1, chunk + 1, microbatch]
                        backward_at = max(free[stage], end[source[stage, 1]] + own.p2p)
                kind[stage] = 0 if forward_at <= backward_at else 1
                begin[stage] = min(forward_at, backward_at)
                if own.split and num[stage, 2] < num[stage, 1] and free[stage] < begin[stage]:
                    kind[stage] = 2
                    begin[stage] = free[stage]
            if begin[stage] < begin[chosen]:
                chosen = stage
        stage = chosen
        if begin[stage] == np.inf:
            break
        is_stale[stage] = True
        what = kind[stage]
        k = num[stage, what]
        num[stage, what] += 1
        if what > 0:
            k = backwards[k]
        microbatch = table[0, k]
        part = table[1, k] if what == 0 else vpp - 1 - table[1, k]
        chunk = part * pp + stage
        at = own.chunk_kinds[chunk] * count + microbatch
        weight = own.chunk_weights[chunk]
        if what == 2:
            free[stage] = begin[stage] + weight * times.weights[0, at]
            live[stage] -= times.held[0, microbatch]
            continue
        if what == 0:
            free[stage] = begin[stage] + weight * times.forward[0, at]
            live[stage] += times.held[0, microbatch]
            is_stale[(stage + 1) % pp] = True
        else:
            free[stage] = begin[stage] + weight * times.backward[0, at]
            is_stale[stage - 1] = True
            if not own.split:
                live[stage] -= times.held[0, microbatch]
            if num[stage, 1] < total:
                needed[stage] = max(needed[stage], backwards[num[stage, 1]] + 1)
        end[done] = free[stage]
        ran[what, chunk, microbatch] = done
        ops[done, 0] = stage
        ops[done, 1] = microbatch
        ops[done, 2] = chunk
        ops[done, 3] = what
        ops[done, 4] = source[stage, what]
        done += 1
    if done < size:
        return np.inf, 0
    return float(largest(free)), size


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
