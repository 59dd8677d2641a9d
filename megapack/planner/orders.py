"""Orders of operations other than Megatron's: what each stage of a rank runs, and its seconds.

Each stage of a rank runs what can begin first: its next forward or its next
backward. So a stage runs forwards ahead while it waits for its first backward, up to twice as many
as in 1F1B. DP ranks that share rows run one order: the one that they would choose if each
micro-batch took as long as on the slowest of them.

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
from megapack.base.jit import inner, kernel
from megapack.base.loops import largest
from megapack.plan.order import group_table, operation_texts
from megapack.planner.board import Board, chain_at, kind_seconds, row_seconds, row_tokens


class OwnOrders(NamedTuple):
    """What stages that choose their order know of the step."""

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
    """int64 [pp]: forwards that a stage may run ahead of its backwards."""
    forward_only: bool
    backward_ratio: float
    """Backward seconds over forward seconds, W included."""
    weight_ratio: float
    """Seconds of a W over those of the forward without attention; 0 if backwards are joint."""
    split: bool
    """Whether backwards leave weight gradients to W's."""


def order_lines(board: Board, own: OwnOrders, first: int, last: int) -> tuple[str, ...]:
    """What each stage runs in the order of `choose_order`, a line per stage."""
    count = board.rows.shape[1]
    passes = 1 if own.forward_only else 2 + own.split
    ran = np.empty((own.pp, passes * count * own.vpp, 3), dtype=np.int64)
    seconds = float(choose_order(board, own, first, last, ran))
    assert seconds < np.inf, "the search found an order that keeps the cap"
    texts, _ = operation_texts(count, own.vpp)
    kind, microbatch, chunk = np.moveaxis(ran, -1, 0)
    return tuple(map(" ".join, texts[kind, chunk // own.pp, microbatch]))


@kernel
def choose_order(board: Board, own: OwnOrders, first: int, last: int, ran: Ints) -> float:
    """Simulated seconds of ranks `first` to `last` - 1 whose stages choose what they run, if each
    micro-batch takes as long as on the slowest of these ranks: of one rank, of all in lockstep, or
    of those that share rows.

    Args:
        ran: int64 [pp, operations, 3], written: kind, micro-batch and chunk in the model of what
            each stage runs; [0, 0, 0] in the search, which needs the seconds only.

    Returns:
        inf if backwards in reverse leave their group of G micro-batches, or no order keeps the cap.
    """
    backwards = _backwards(board, own, first, last)
    if backwards.size == 0:
        return np.inf
    return _choose(own, _times(board, own, first, last), backwards, ran)


class _Times(NamedTuple):
    """What micro-batches cost in a chunk of weight 1."""

    seconds: Floats
    """float64 [3, kinds * M], see `pipeline.kernels.RankOps`: of the F, the B without its W, and
    the W, which is 0 if backwards are joint."""
    held: Floats
    """float64 [M]: tokens that a stage holds from the F to the W, each chunk counted whole."""


@inner
def _times(board: Board, own: OwnOrders, first: int, last: int) -> _Times:
    """What each micro-batch costs on the slowest of some ranks."""
    cost = board.cost
    count = board.rows.shape[1]
    kinds = cost.square_factors.size
    seconds = np.zeros((3, kinds * count))
    held = np.zeros(count)
    for k in range(count):
        for rank in range(first, last):
            row = board.rows[rank, k]
            level = board.level[row]
            held[k] = max(held[k], row_tokens(cost, level, board.tokens[row]) / (1 << level))
            # Attention has no weights, so a W has no part that grows with squared tokens.
            weights = row_seconds(cost, level, board.tokens[row], 0, board.num_samples[row])
            for at in range(k, kinds * count, count):
                seconds[0, at] = max(seconds[0, at], kind_seconds(board, row, at // count))
                seconds[2, at] = max(seconds[2, at], own.weight_ratio * weights)
        for at in range(k, kinds * count, count):
            backward = own.backward_ratio * seconds[0, at]
            seconds[2, at] = min(seconds[2, at], backward)
            seconds[1, at] = backward - seconds[2, at]
        if own.forward_only:
            # Nothing is kept in a pass without backwards: its peak is the largest micro-batch.
            held[k] = np.inf if held[k] > own.cap else 0.0
    return _Times(seconds, held)


@inner
def _choose(own: OwnOrders, times: _Times, backwards: Ints, ran: Ints) -> float:
    """Seconds of a rank whose stages choose what they run; inf if all wait for each other.

    A stage runs what can begin first of its next forward and its next backward, the forward if both
    can, and a W in each wait. A forward may be no further ahead than the warm-up, and break no cap.
    Operations begin in the order of time, so a stage knows all results that it could run with.

    Args:
        backwards: int64 [M * vpp], the virtual micro-batch of each backward.
        ran: see `choose_order`.
    """
    pp, vpp = own.pp, own.vpp
    count = times.held.size
    table = group_table(count, vpp, own.group)
    total = count * vpp
    num_backwards = 0 if own.forward_only else total
    # When the F and the B of each chunk end; -1 before they have run.
    end = np.full((2, pp * vpp, count), -1.0)
    # Per stage: F's, B's and W's that have run, forwards that its next backward needs, when it is
    # free, and tokens that it holds.
    num = np.zeros((pp, 3), dtype=np.int64)
    needed = np.full(pp, backwards[0] + 1)
    free = np.zeros(pp)
    live = np.zeros(pp)
    # And what it runs next: when and which kind. It is stale once the stage has run something, or a
    # result has come.
    begin = np.empty(pp)
    kind = np.empty(pp, dtype=np.int64)
    is_stale = np.ones(pp, dtype=np.bool_)
    left = pp * (total + num_backwards)
    while True:
        stage = 0
        for s in range(pp):
            if is_stale[s]:
                is_stale[s] = False
                # 1. When the next forward can begin, and when the next backward.
                forward_at = np.inf
                backward_at = np.inf
                k = num[s, 0]
                if k < min(total, needed[s] + own.warmup[s]):
                    microbatch = table[0, k]
                    chunk = table[1, k] * pp + s
                    if live[s] + times.held[microbatch] <= own.cap:
                        if chunk == 0:
                            forward_at = free[s]
                        elif end[0, chunk - 1, microbatch] >= 0:
                            forward_at = max(free[s], end[0, chunk - 1, microbatch] + own.p2p)
                if num[s, 1] < num_backwards:
                    k = backwards[num[s, 1]]
                    microbatch = table[0, k]
                    chunk = (vpp - 1 - table[1, k]) * pp + s
                    if chunk == pp * vpp - 1:
                        if end[0, chunk, microbatch] >= 0:
                            backward_at = free[s]
                    elif end[1, chunk + 1, microbatch] >= 0:
                        backward_at = max(free[s], end[1, chunk + 1, microbatch] + own.p2p)
                # 2. The first of both, or a W before it.
                kind[s] = 0 if forward_at <= backward_at else 1
                begin[s] = min(forward_at, backward_at)
                if own.split and num[s, 2] < num[s, 1] and free[s] < begin[s]:
                    kind[s] = 2
                    begin[s] = free[s]
            if begin[s] < begin[stage]:
                stage = s
        if begin[stage] == np.inf:
            return float(largest(free)) if left == 0 else np.inf
        # 3. Run what begins first on any stage.
        is_stale[stage] = True
        what = kind[stage]
        k = num[stage, what]
        if what > 0:
            k = backwards[k]
        microbatch = table[0, k]
        chunk = (table[1, k] if what == 0 else vpp - 1 - table[1, k]) * pp + stage
        if ran.size > 0:
            place = num[stage, 0] + num[stage, 1] + num[stage, 2]
            ran[stage, place, 0] = what
            ran[stage, place, 1] = microbatch
            ran[stage, place, 2] = chunk
        seconds = times.seconds[what, own.chunk_kinds[chunk] * count + microbatch]
        free[stage] = begin[stage] + own.chunk_weights[chunk] * seconds
        num[stage, what] += 1
        # 4. Tell the stages that wait for its result.
        if what == 0:
            live[stage] += times.held[microbatch]
            is_stale[(stage + 1) % pp] = True
        elif what == 2 or not own.split:
            live[stage] -= times.held[microbatch]
        if what == 1:
            is_stale[stage - 1] = True
            if num[stage, 1] < total:
                needed[stage] = max(needed[stage], backwards[num[stage, 1]] + 1)
        if what < 2:
            end[what, chunk, microbatch] = free[stage]
            left -= 1


@inner
def _backwards(board: Board, own: OwnOrders, first: int, last: int) -> Ints:
    """The virtual micro-batch of each backward in the one order of some ranks, int64 [M * vpp]; []
    if those in reverse leave their group.

    Chains run their backwards in reverse. Where those of several ranks overlap, their union does.
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
    if own.vpp == 1:
        return turned
    for k in range(count):
        if turned[k] // own.group != k // own.group:
            return turned[:0]
    table = group_table(count, own.vpp, own.group)
    # Inside a chunk's part of a group, micro-batches are counted from the part's first one.
    backwards: Ints = np.arange(table.shape[1]) + turned[table[0]] - table[0]
    return backwards
