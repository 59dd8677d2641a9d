"""Orders of operations other than Megatron's: what each stage of a rank runs, and its seconds.

Each stage of a rank runs what can begin first: its next forward or its next
backward. So a stage runs forwards ahead while it waits for its first backward, up to twice as many
as in 1F1B. A block of DP ranks that share rows must run one order, which cannot fit all of them:
in the search their stages run their warm-up, and then alternate.

A split backward leaves its weight gradients (W) to the stage, which may run them at any later time:
where it would wait, first in, first out. With pp=2 and two rows whose forward, backward and W take
1 s each:

    stage 0   0F0 1F0 .   0B0 0W0 1B0 1W0
    stage 1   .   0F0 0B0 1F0 1B0 0W0 1W0

A row is held until its W. A forward that would put more tokens on a stage than it may hold is put
off, or W's run first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from megapack.base.arrays import Floats, Ints
from megapack.base.jit import kernel
from megapack.base.loops import largest
from megapack.plan.order import group_table, interleave, order_lines, stage_lists
from megapack.planner.board import (
    Board,
    chain_at,
    kind_seconds,
    row_seconds,
    row_tokens,
)

# A W may end later than the wait in which it begins, by this part of its own seconds: a W of 4 s
# begins if the wait is 1 s or longer. Chosen by hand; a stage that chooses uses any wait.
PATIENCE = 0.75
# After the search, each order is run with the first patiences. These are the search's own, so the
# step takes no longer than it found: PATIENCE of blocks, and 1 of stages that choose. The fastest
# order is then run with the others: in 40 steps this was as fast as all orders with all of them.
_FIRST_PATIENCES = (PATIENCE, 1.0)
_OTHER_PATIENCES = (0.0, 0.25, 0.5)


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
    """int64 [pp]: forwards that a stage which chooses may run ahead of its backwards."""
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
    ops: Ints
    """int64 [dp + 1, most operations, 5], written: stage, micro-batch, chunk in the model, kind and
    waits_for of `StepOrder`, without W's. The last order is that of blocks of ranks that share
    rows; in lockstep all ranks run the first one."""
    num_ops: Ints
    """int64 [dp + 1], written; 0 without an order: backwards in reverse leave their group of G
    micro-batches, or none keeps the cap."""


class RanksOfOneOrder(NamedTuple):
    """DP ranks that run the same order: one rank, a block that shares rows, or all in lockstep."""

    board: Board
    own: OwnOrders
    rank: int
    """The first of them; 0 in lockstep."""
    num_ranks: int
    """Of a block that shares rows; 1 for a rank alone, and for all ranks in lockstep."""
    lockstep: bool

    def best_order(self, warmups: Sequence[Ints]) -> tuple[float, list[tuple[str, ...]]]:
        """The fastest order of these ranks. Writes `own.ops[rank]`.

        Args:
            warmups: for `set_order`.

        Returns:
            Their seconds, and what each of them runs, a line per stage.
        """
        # Without W's all patiences are alike.
        first = _FIRST_PATIENCES if self.own.split else _FIRST_PATIENCES[:1]
        others = _OTHER_PATIENCES if self.own.split else ()
        runs = (self._run(order, value) for order in self._orders(warmups) for value in first)
        best = min(runs, key=lambda run: run.seconds)
        # Later orders were written over it.
        self.own.ops[self.rank, : len(best.ops)] = best.ops
        self.own.num_ops[self.rank] = len(best.ops)
        runs = (self._run(self.rank, value) for value in others)
        best = min([best, *runs], key=lambda run: run.seconds)
        assert best.seconds < np.inf, "the search found an order that keeps the cap"
        shape = (self.num_ranks, self.own.pp, -1)
        pairs = zip(best.ran.reshape(shape), best.num_ran.reshape(shape[:2]), strict=True)
        return best.seconds, [order_lines(best.ops, *pair) for pair in pairs]

    def _orders(self, warmups: Sequence[Ints]) -> Iterator[int]:
        """Indices of orders to run. Each is written over the one before it, but for the order that
        blocks of ranks had in the search."""
        board, own, rank = self.board, self.own, self.rank
        if self.num_ranks > 1:
            yield own.num_ops.size - 1
        first, last = (0, board.rows.shape[0]) if self.lockstep else (rank, rank + self.num_ranks)
        # A move that was not kept may have left its own.
        choose_order(board, own, rank, first, last, np.empty(own.ops.shape[1]))
        yield rank
        for warmup in warmups:
            set_order(board, own, warmup, rank, first, last)
            yield rank

    def _run(self, order: int, patience: float) -> _Run:
        own, num_ops = self.own, int(self.own.num_ops[order])
        stages = self.num_ranks * own.pp
        ran = np.empty((stages, 2 * own.ops.shape[1] // own.pp + 1), dtype=np.int64)
        end = np.empty((own.ops.shape[1], self.num_ranks))
        args = (self.lockstep, own, self.rank, self.num_ranks, order, patience, ran, end, 0)
        seconds = float(run_ranks(self.board, *args))
        return _Run(seconds, own.ops[order, :num_ops].copy(), ran[:, :-1], ran[:, -1])


class _Run(NamedTuple):
    """What ranks ran in one order."""

    seconds: float
    ops: Ints
    """The order, see `OwnOrders.ops`."""
    ran: Ints
    """int64 [ranks * pp, 2 * operations / pp], see `run_ranks`."""
    num_ran: Ints
    """int64 [ranks * pp], how many these are."""


@kernel
def run_ranks(
    board: Board,
    lockstep: bool,
    own: OwnOrders,
    rank: int,
    num_ranks: int,
    order: int,
    patience: float,
    ran: Ints,
    end: Floats,
    first_column: int,
) -> float:
    """Simulated seconds of ranks from this one on that run one of `own.ops`; inf if a stage breaks
    its cap.

    Args:
        num_ranks: see `RanksOfOneOrder`.
        order: index of the order.
        ran: int64 [ranks * pp, 2 * operations / pp + 1], written: what each stage of each rank
            runs, in this order: the index of an F or B, or -1 - index for the W of this B. The last
            column says how many these are. [0, 0]: nothing is written, as in the search.
        end: float64 [operations, ranks], written from `first_column` on: when each F and B ends.
    """
    count = board.rows.shape[1]
    times = _no_times(board, num_ranks, count)
    first = np.zeros((num_ranks, count), dtype=np.int64)
    for d in range(num_ranks):
        for k in range(count if num_ranks > 1 else 0):
            first[d, k] = d - d % (1 << board.level[board.rows[rank + d, k]])
        low = 0 if lockstep else rank + d
        high = board.rows.shape[0] if lockstep else low + 1
        _set_times(board, own, low, high, times, d)
    if own.num_ops[order] == 0:
        return np.inf
    ops = own.ops[order, : own.num_ops[order]]
    return _filled_seconds(own, ops, times, first, patience, ran, end, first_column)


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
    end: Floats,
    first_column: int,
) -> float:
    """`run_ranks` of the operations `ops`, as in `OwnOrders`.

    Args:
        first_rank: int64 [ranks, M], the first rank of those that share the micro-batch and begin
            its operations together.
    """
    num_ranks, num_microbatches = first_rank.shape
    count = ops.shape[0]
    stages = num_ranks * own.pp
    free = np.zeros(stages)
    live = np.zeros(stages)
    # Backwards whose W has not run: a queue per stage, with its first entry and its end.
    queue = np.empty((stages, count // own.pp), dtype=np.int64)
    begun = np.zeros(stages, dtype=np.int64)
    last = np.zeros(stages, dtype=np.int64)
    begin = np.empty(num_ranks)
    num_ran = np.zeros(stages, dtype=np.int64)
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
                begin[d] = max(begin[d], end[source, first_column + d] + own.p2p)
            sharer = first_rank[d, microbatch]
            begin[sharer] = max(begin[sharer], begin[d])
        for d in range(num_ranks):
            stage = d * own.pp + ops[op, 0]
            ready = begin[first_rank[d, microbatch]]
            while begun[stage] < last[stage]:
                now = free[stage]
                is_full = is_forward and live[stage] + times.held[d, microbatch] > own.cap
                if ready <= now and not is_full:
                    break
                waiting = queue[stage, begun[stage]]
                chunk = ops[waiting, 2]
                k = own.chunk_kinds[chunk] * num_microbatches + ops[waiting, 1]
                seconds = times.weights[d, k] * own.chunk_weights[chunk]
                if now + (1 - patience) * seconds > ready and not is_full:
                    break
                free[stage] += seconds
                live[stage] -= times.held[d, ops[waiting, 1]]
                if ran.size > 0:
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
            free[stage] = begin[first_rank[d, microbatch]] + weight * seconds
            end[op, first_column + d] = free[stage]
            if ran.size > 0:
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
        for waiting in queue[stage, begun[stage] : last[stage]]:
            chunk = ops[waiting, 2]
            k = own.chunk_kinds[chunk] * num_microbatches + ops[waiting, 1]
            free[stage] += times.weights[stage // own.pp, k] * own.chunk_weights[chunk]
            if ran.size > 0:
                ran[stage, num_ran[stage]] = -1 - waiting
                num_ran[stage] += 1
        if ran.size > 0:
            ran[stage, -1] = num_ran[stage]
    return float(largest(free))


@kernel
def choose_order(
    board: Board, own: OwnOrders, order: int, first: int, last: int, end: Floats
) -> float:
    """Write what the stages of ranks `first` to `last` - 1 choose to run, if each micro-batch takes
    as long as on the slowest of these ranks: of one rank, of all in lockstep, or of a block.

    Args:
        order: its index in `own.ops`.
        end: float64 [operations], written: when each F and B ends.

    Returns:
        Simulated seconds; inf if backwards in reverse leave their group of G micro-batches, or if
        no order keeps the cap.
    """
    backwards, times = _to_run(board, own, order, first, last)
    if backwards.size == 0:
        return np.inf
    seconds, own.num_ops[order] = _choose(own, times, backwards, own.ops[order], end)
    return seconds


@kernel
def set_order(
    board: Board, own: OwnOrders, warmup: Ints, order: int, first: int, last: int
) -> None:
    """Write the one order of ranks `first` to `last` - 1, whose stages run their warm-up and then
    alternate. What can begin first on one rank may not on another, so ranks that share rows run
    such an order in the search.

    Args:
        warmup: int64 [pp], forwards that each stage may run ahead of its backwards.
        order: its index in `own.ops`.
    """
    backwards, times = _to_run(board, own, order, first, last)
    if backwards.size == 0:
        return
    count = board.rows.shape[1]
    stages, ends = stage_lists(
        warmup, own.vpp, count, own.group, own.forward_only, backwards, times.held[0], own.cap
    )
    columns, _ = interleave(stages, ends, own.pp, own.vpp)
    own.num_ops[order] = columns.shape[1]
    for op in range(columns.shape[1]):
        for k in range(5):
            own.ops[order, op, k] = columns[k, op]


@kernel
def _to_run(board: Board, own: OwnOrders, order: int, first: int, last: int) -> tuple[Ints, _Times]:
    """What `_backwards` returns and what micro-batches cost, for a new order of some ranks; there
    is none until it is written."""
    own.num_ops[order] = 0
    times = _no_times(board, 1, board.rows.shape[1])
    _set_times(board, own, first, last, times, 0)
    return _backwards(board, own, first, last), times


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
def _choose(
    own: OwnOrders, times: _Times, backwards: Ints, ops: Ints, end: Floats
) -> tuple[float, int]:
    """Seconds of a rank whose stages choose what they run, and the number of forwards and
    backwards; inf and 0 if all wait for each other.

    A stage runs what can begin first of its next forward and its next backward, the forward if both
    can, and a W in each wait. A forward may be no further ahead than the warm-up, and break no cap.
    Operations begin in the order of time, so a stage knows all results that it could run with.

    Args:
        times: of one rank.
        backwards: int64 [M * vpp], the virtual micro-batch of each backward.
        ops: int64 [operations, 5], written.
        end: float64 [operations], written: when each ends.
    """
    pp, vpp = own.pp, own.vpp
    count = times.held.shape[1]
    total = count * vpp
    num_backwards = 0 if own.forward_only else total
    size = (total + num_backwards) * pp
    table = group_table(count, vpp, own.group)
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
    count = board.rows.shape[1]
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
